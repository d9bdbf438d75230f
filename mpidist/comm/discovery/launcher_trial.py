"""Trial of the launcher: two ranks on this node start MPI, add up their ranks and end.

``python -m mpidist.comm.discovery.launcher_trial`` is the program of those ranks; ``try_launcher``
starts it as a child job and returns the result. If the launcher and the library do not match, the
ranks do not see each other, or end in MPI_Init.
"""

from __future__ import annotations

import os

from mpidist.comm.discovery import child_job
from mpidist.comm.mpi import byte_strings, runtime
from mpidist.comm.mpi.cuda_context import ENV_CUDA_AWARE
from mpidist.errors import MpidistError

_MARKER = "mpidist-handshake"
_MODULE = "mpidist.comm.discovery.launcher_trial"


def try_launcher(library: str, silence_s: float) -> str:
    """Start two ranks with the library's own mpirun.

    Local: one rank calls it. Blocks: some seconds, at most about ``silence_s``.

    Args:
        library: The MPI library's description of itself.
        silence_s: Seconds without output after which the job is ended.

    Returns:
        "" if the ranks communicated, else the reason of the failure.
    """
    sums, failure = child_job.answers(
        library, _MODULE, _MARKER, silence_s, wrong="two ranks did not add up"
    )
    return "" if sums == [f"{child_job.RANKS} 1"] else failure


def main() -> None:
    """Sum the ranks; rank 0 prints the number of ranks and the sum."""
    # Without this, the rank would import torch to create a CUDA context.
    os.environ[ENV_CUDA_AWARE] = "0"
    world = runtime.world()
    if world.size != child_job.RANKS:
        raise MpidistError(f"{child_job.RANKS} ranks were started, but MPI sees {world.size}")
    total = sum(int(text) for text in byte_strings.gathered(world.comm, b"%d" % world.rank))
    if world.rank == 0:
        print(_MARKER, world.size, total, flush=True)


if __name__ == "__main__":
    main()
