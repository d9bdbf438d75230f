"""Trials of MPI operations on device memory, in a job of their own, because a trial may crash.

``python -m mpidist.comm.discovery.capability_trial --device cuda:0 Bcast …`` is the program of that
job's ranks. ``try_operations`` starts the job and reads the result of each operation; if one of
them ends the job, it starts the job again for the rest.

The job has two ranks on one node: it tries transfers between processes and devices, not the
network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence

import torch

from mpidist.comm.discovery import child_job
from mpidist.comm.discovery.child_job import NOT_TRIED
from mpidist.comm.discovery.trial_operations import OPERATIONS, attempt
from mpidist.comm.mpi import launcher_env, runtime
from mpidist.comm.mpi.library import load
from mpidist.errors import LaunchError

# Importing torch from a cold network file system and starting CUDA take long.
SILENCE_S = 60.0
PROGRAM = (sys.executable, "-m", "mpidist.comm.discovery.capability_trial")

_MARKER = "mpidist-probe"
MPI_FIRST = "--mpi-first"


def try_operations(
    device: str,
    library: str,
    operations: Sequence[str] = OPERATIONS,
    program: Sequence[str] = PROGRAM,
    silence_s: float = SILENCE_S,
    cuda_first: bool = True,
) -> dict[str, str]:
    """Try operations on device memory in jobs of their own, on two ranks of this node.

    Local: one rank calls it. Blocks: some seconds, and ``silence_s`` more for each operation that
    hangs.

    Args:
        device: As torch names it: ``cuda:0``; ``cpu`` for a dry run.
        library: The MPI library's description of itself.
        operations: Names in ``OPERATIONS``.
        program: Beginning of the ranks' command line.
        silence_s: Seconds without output after which an operation counts as hung.
        cuda_first: The ranks have a CUDA context when MPI starts; else they start MPI first.

    Returns:
        For each operation ``WORKS`` or the reason why it does not work, which begins with
            ``NOT_TRIED`` if the job could not be started.
    """
    start = child_job.launcher(library)
    if start is None:
        return dict.fromkeys(operations, f"{NOT_TRIED}{child_job.NO_LAUNCHER}")
    flags = () if cuda_first else (MPI_FIRST,)
    results: dict[str, str] = {}
    while left := [operation for operation in operations if operation not in results]:
        results |= _launch([*start, *program, *flags, "--device", device, *left], left, silence_s)
    return {operation: results[operation] for operation in operations}


def _launch(command: Sequence[str], operations: Sequence[str], silence_s: float) -> dict[str, str]:
    """Run one job; return the results of its operations, at least one."""
    results: dict[str, str] = {}
    under_way: list[str] = []

    def on_line(line: str) -> bool:
        # The marker may be anywhere in the line, after output that a library wrote to stderr.
        found = re.search(rf"{_MARKER} (begins|ended) (\w+) ?(.*)", line)
        if found is None or found[2] not in operations:
            return False
        under_way[:] = [found[2]] if found[1] == "begins" else []
        if found[1] == "ended":
            results[found[2]] = found[3]
        return True

    ending = child_job.run(command, on_line, silence_s)
    for operation in under_way:
        results[operation] = ending or "ended before it returned"
    if results:
        return results
    return dict.fromkeys(
        operations, f"{NOT_TRIED}{os.path.basename(command[0])}: {ending or 'ended without output'}"
    )


# --- a rank of that job ---


def main(args: Sequence[str] | None = None) -> None:
    """Try the operations on the command line, and print a line before and after each."""
    options = _parser().parse_args(args)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(options.limit)  # ends an orphaned rank, even inside MPI
    # Both ranks inherit the core binding of the rank that started them.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    if options.mpi_first:
        load(makes_context=False)
    device = _start_device(torch.device(options.device))
    world = runtime.world()
    if world.size < child_job.RANKS:
        raise LaunchError(
            f"the launcher started {child_job.RANKS} ranks that do not see each other: it belongs "
            "to another MPI library"
        )
    for operation in options.operations:
        _report(world, "begins", operation)
        try:
            verdict = attempt(world.comm, operation, device)
        except Exception as error:
            # An error of a full or busy device is not a result about MPI.
            learned = (
                NOT_TRIED
                if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
                else ""
            )
            print(
                f"{_MARKER} ended {operation} {learned}{type(error).__name__}: "
                f"{' '.join(str(error).split())}",
                flush=True,
            )
            raise  # ends the job; the other rank may wait in the operation
        _report(world, "ended", operation, verdict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpidist.comm.discovery.capability_trial",
        description="try MPI operations on device memory",
    )
    parser.add_argument(
        "--device",
        default="cuda:0",
        help="cuda:N for rank 0, the next for rank 1; cpu for a dry run",
    )
    parser.add_argument(
        MPI_FIRST,
        action="store_true",
        help="start MPI before CUDA, as a job did whose answer this is to be",
    )
    parser.add_argument(
        "--limit", type=int, default=600, help="seconds after which the rank ends itself"
    )
    parser.add_argument("operations", nargs="*", choices=[*OPERATIONS, []], default=OPERATIONS)
    return parser


def _start_device(device: torch.device) -> torch.device:
    # Ranks seldom share a device. If MPI has not started yet, it will find the context created
    # here.
    if device.type == "cuda":
        torch.cuda.init()
        rank = launcher_env.from_environment(os.environ).local_rank or 0
        device = torch.device("cuda", ((device.index or 0) + rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    return device


def _report(world: runtime.World, *lines: str) -> None:
    if world.rank == 0:
        print(_MARKER, *lines, flush=True)


if __name__ == "__main__":
    main()
