"""Jobs of a program, on mpidist and on its peer: command lines, and their execution with a limit.

The command lines are data. ``run`` starts them, reads what they print, and ends what is left of
them by the ids of its own children.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mpidist.comm.mpi.launcher_env import without_launcher
from tests.peers import process_start
from tests.peers.programs import Program

ROOT = Path(__file__).resolve().parents[2]
OURS, PEER = "mpidist", "peer"
REPLACED = "gloo,nccl,mpi,ddp,rpc"
_POLL_S = 0.2
_END_S = 8.0
_KEPT = 20000  # characters of the output


@dataclass(frozen=True)
class Ended:
    """End of a job."""

    status: int | None  # None at its limit
    output: str
    has_said: bool = False  # what it had to say; it was ended then


def launcher(ranks: int) -> list[str]:
    """Return the beginning of a command line that starts ranks of MPI."""
    return [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-n", str(ranks)]


def program_words(program: Program, rank: int | None) -> list[str]:
    """Return the words behind the interpreter."""
    kind, _, name = program.path.rpartition(":")
    words = ["-u", "-m", name] if kind == "module" else ["-u", Path(program.path).name]
    return words + [
        arg.replace("{rank}", str(rank)).replace("{size}", str(program.ranks))
        for arg in program.args
    ]


def commands(program: Program, side: str) -> list[list[str]]:
    """Return the command lines of a job, which are started at the same time."""
    per_rank = [[sys.executable, *program_words(program, rank)] for rank in range(program.ranks)]
    if side == OURS:
        if len({tuple(words) for words in per_rank}) == 1:
            return [[*launcher(program.ranks), *per_rank[0]]]
        parts = [["-n", "1", *words] for words in per_rank]
        joined = [word for part in parts for word in (":", *part)][1:]
        return [[*launcher(1)[:-2], *joined]]
    if program.start == "ranks":
        return per_rank
    if program.start == "spawn":
        return per_rank[:1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = without_u(program_words(program, None))
    return [[*torchrun, "--nproc-per-node", str(program.ranks), *words]]


def without_u(words: Sequence[str]) -> list[str]:
    """Return torchrun's words, which starts Python unbuffered by itself."""
    return [word for word in words if word != "-u"]


def environment(
    side: str, record: Path, program: Program | None = None, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables of a job."""
    here = Path(__file__).parent
    path = [str(here / "startup"), str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    variables = {
        **without_launcher(given),
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        process_start.RECORD: str(record),
    }
    variables.pop("MPIDIST_REPLACE", None)
    if side == OURS:
        variables["MPIDIST_REPLACE"] = REPLACED
    if program is not None:
        variables[process_start.DEVICES] = str(program.devices)
        if side == OURS and program.start != "torchrun":
            variables[process_start.SPAWNS] = "1"
        variables |= program.environ
    return variables


def run(
    started: Sequence[Sequence[str]],
    folder: Path,
    variables: Mapping[str, str],
    limit_s: float,
    until: str = "",
) -> Ended:
    """Run command lines together.

    Blocks: until all have ended, one of them has failed, they have said ``until``, or the limit.
    """
    with tempfile.TemporaryFile("a+") as output:
        processes = [
            subprocess.Popen(
                list(words),
                cwd=folder,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for words in started
        ]
        deadline = time.monotonic() + limit_s
        status: int | None = None
        has_said = False
        try:
            while time.monotonic() < deadline and not has_said:
                ends = [process.poll() for process in processes]
                if any(ends) or None not in ends:
                    status = next((end for end in ends if end), 0)
                    break
                if until:
                    has_said = re.search(until, _text(output), re.MULTILINE) is not None
                time.sleep(_POLL_S)
        finally:
            for process in processes:
                end(process)
        return Ended(status, _text(output)[-_KEPT:], has_said)


def _text(file) -> str:
    # At an offset of its own: the processes write at that of the file.
    with open(f"/proc/self/fd/{file.fileno()}", errors="replace") as again:
        return again.read().replace("\0", "")


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    # mpirun's ranks lead sessions of their own.
    left = psutil.wait_procs(family, timeout=1.0)[1]
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(left, timeout=_END_S)
