"""All-gather of byte strings by buffer collectives; mpi4py's object calls would unpickle."""

from __future__ import annotations

from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi


def gathered(mpi: Mpi, data: bytes) -> list[bytes]:
    """Return all ranks' strings, by rank.

    Collective: over the communicator.

    Args:
        mpi: An mpi4py communicator, or ``MpiCalls``.
        data: This rank's string.
    """
    size = mpi.Get_size()
    lengths = bytearray(8 * size)
    mpi.Allgather((len(data).to_bytes(8, "little"), 8, MPI.BYTE), (lengths, 8, MPI.BYTE))
    counts = [int.from_bytes(lengths[8 * i : 8 * i + 8], "little") for i in range(size)]
    starts = [sum(counts[:i]) for i in range(size)]
    everything = bytearray(sum(counts))
    mpi.Allgatherv((data, len(data), MPI.BYTE), (everything, (counts, starts), MPI.BYTE))
    return [
        bytes(everything[start : start + count])
        for start, count in zip(starts, counts, strict=True)
    ]
