"""Jobs in sequence, on this machine or between two network namespaces over a limited link."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpidist.comm.mpi.launcher_env import without_launcher

# A job has this long to end after SIGTERM.
_END_S = 15.0
# Status of slow_link.sh where namespaces are not allowed.
_SKIPPED = 77
_HERE = Path(__file__).resolve().parents[1]
PROGRAM = _HERE / "bench_scaling.py"


@dataclass(frozen=True)
class Job:
    """Command line with its name and its additional environment variables."""

    name: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def plain(ranks: int, passed: Sequence[str], launcher: str | None = None) -> Job:
    """Return the job of ``ranks`` ranks on this machine."""
    return Job(
        f"{ranks} ranks",
        (*start_of(launcher), "-n", str(ranks), sys.executable, str(PROGRAM), *passed),
    )


def start_of(
    launcher: str | None, options: Sequence[str] = ("--oversubscribe", "--bind-to", "none")
) -> list[str]:
    """Return the words of a launcher up to ``-n``.

    Without a text: the mpirun in the folder of this Python, or else the one on PATH, with
    ``options``.
    """
    if launcher is not None:
        return shlex.split(launcher)
    own_launcher = Path(sys.executable).with_name("mpirun")
    return [str(own_launcher) if own_launcher.exists() else "mpirun", *options]


def on_link(link: str, ranks_per_node: int, passed: Sequence[str], mpich: Path) -> Job:
    """Return the job of two namespaces with ``ranks_per_node`` ranks each, on MPICH over TCP.

    Args:
        link: Rate of the link between the namespaces, as in tc.
        mpich: Folder of an MPICH, with ``bin/mpirun`` and ``lib/libmpi.so.12``.
    """
    command = (
        str(_HERE / "slow_link.sh"),
        link,
        str(mpich / "bin" / "mpirun"),
        sys.executable,
        str(PROGRAM),
        *passed,
    )
    variables = {"RANKS": str(ranks_per_node), "MPI4PY_LIBMPI": str(mpich / "lib" / "libmpi.so.12")}
    return Job(f"2 × {ranks_per_node} ranks over {link}", command, variables)


def why_no_link(mpich: Path) -> str | None:
    """Return a known obstacle to jobs between namespaces; None without one."""
    for needed in (mpich / "bin" / "mpirun", mpich / "lib" / "libmpi.so.12"):
        if not needed.exists():
            return (
                f"{needed.name} of MPICH is not in the folder given: pip install --target "
                "FOLDER mpich, and --mpich FOLDER"
            )
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


def run(job: Job, limit_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """Run a job; return its records, and the reason if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            status, errors_text = run_limited(
                [*job.command, "--output", folder], job.variables, limit_s
            )
        except OSError as error:
            return [], f"{job.command[0]} does not start: {error.strerror or error}"
        written = [
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(Path(folder).glob("*.json"))
        ]
    if status is None:
        return [], f"not ended after {limit_s:g} s"
    if status == _SKIPPED:
        return [], errors_text.strip().splitlines()[-1] if errors_text.strip() else "skipped"
    if status or not written:
        return [], f"ended with status {status}: {_reason(errors_text)}"
    return written, None


def _reason(errors_text: str) -> str:
    """Return the line of stderr with the likely cause: the first error, not the summary."""
    lines = [
        re.sub(r"^\[rank \d+\] ", "", line).strip()
        for line in errors_text.splitlines()
        if line.strip()
    ]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exit|Timeout|Exception)\b", line)]
    return (named or lines or ["it said nothing"])[0]


def run_limited(
    command: Sequence[str], variables: dict[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Run a command; return its status (None after ``limit_s``) and its stderr."""
    environment = {**without_launcher(os.environ), **variables}
    with tempfile.TemporaryFile() as errors:
        # A signal between the job's start and the block that ends it would leave the job behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        job: subprocess.Popen[bytes] | None = None
        status: int | None = None
        try:
            try:
                # In a session of its own, so that one signal reaches slow_link.sh and its mpirun.
                job = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if job is not None and job.poll() is None:
                _end(job)
        errors.seek(0)
        return status, errors.read().decode(errors="replace")


def _end(job: subprocess.Popen[bytes]) -> None:
    # The launcher ends its ranks before itself.
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
