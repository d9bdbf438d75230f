"""Exchange between the ranks of a recording, on a communicator of their own beside all groups."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator

from mpidist.comm.mpi import (
    backoff,
    byte_strings,
    closed_communicators,
    creation_barrier,
    exited_ranks,
    mpi_errors,
    nonblocking,
    runtime,
)
from mpidist.comm.mpi.library import MPI
from mpidist.errors import CommTimeout, MpidistError
from mpidist.trace import clocks
from mpidist.trace.clocks import Offset

TIMEOUT_S = 1800.0
_CLOCK_TAG, _PART_TAG, _END_TAG = range(1, 4)
_LENGTH = struct.Struct("<q")
_PIECE_BYTES = 1 << 26  # MPI counts in ints
_SLEEP_S = 1e-3


class Exchange:
    """A duplicate of the world's communicator.

    Collective: over the world's ranks, as is each method but ``close``.

    Raises:
        CommTimeout, RankFailureError: A rank did not come, or has ended.
    """

    def __init__(self) -> None:
        world = runtime.world()
        self.rank, self.size = world.rank, world.size
        self._mpi, _ = creation_barrier.create_world_group("trace", range(world.size), TIMEOUT_S)

    def strings(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        gathered = byte_strings.gathered(self._mpi, text.encode(errors="surrogateescape"))
        return [data.decode(errors="surrogateescape") for data in gathered]

    def offset(self) -> Offset:
        """Return the offset of this rank's clock to rank 0's."""
        return clocks.measured(self._mpi, _CLOCK_TAG)

    def meet(self, may_have_left: bool) -> None:
        """Wait until all ranks are here; sleep meanwhile.

        Args:
            may_have_left: The programs of ranks may have ended, and the ranks yet come.

        Raises:
            CommTimeout: A rank did not come in time.
            RankFailureError: A rank has died, or its program has ended.
        """
        ranks = range(self.size)
        where = f"rank {self.rank} of {self.size}: the end of the trace"
        start = time.monotonic()

        def check() -> None:
            ended = exited_ranks.ended(ranks)
            if ended and (exited_ranks.have_died(ended) or not may_have_left):
                raise exited_ranks.failure(where, ended)
            if time.monotonic() - start > TIMEOUT_S:
                raise CommTimeout(f"{where}: not all ranks came within {TIMEOUT_S:g} s")

        request = self._mpi.Ibarrier()
        try:
            backoff.until(request.Test, check, sleep_s=_SLEEP_S)
        except MpidistError:
            nonblocking.keep([request])
            raise

    def at_root(self, data: bytes) -> list[bytes]:
        """Return the strings of all ranks on rank 0; on the others nothing."""
        lengths = bytearray(_LENGTH.size * self.size)
        length = _LENGTH.pack(len(data))
        self._mpi.Allgather((length, len(length), MPI.BYTE), (lengths, len(length), MPI.BYTE))
        if self.rank:
            self._send(data)
            return []
        others = [received for (received,) in _LENGTH.iter_unpack(lengths)][1:]
        return [data, *(self.receive(rank, length) for rank, length in enumerate(others, 1))]

    def send(self, data: memoryview) -> None:
        """Send a part to rank 0, which receives those of all ranks one after the other."""
        self._send(data)

    def receive(self, rank: int, length: int) -> bytes:
        """Return the part of a rank; on rank 0."""
        space = bytearray(length)
        view = memoryview(space)
        for begin in range(0, length, _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            self._mpi.Recv((piece, len(piece), MPI.BYTE), rank, _PART_TAG)
        return bytes(space)

    def close(self) -> None:
        """Give the communicator up. Not collective."""
        closed_communicators.add(self._mpi, _END_TAG)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the typed error of a call of MPI in the block; another error as it is."""
        try:
            yield
        except Exception as error:
            if not mpi_errors.is_mpi_error(error):
                raise
            where = f"rank {self.rank} of {self.size}: trace"
            raise mpi_errors.explain(error, where, self._mpi, range(self.size)) from error

    def _send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            request = self._mpi.Isend((piece, len(piece), MPI.BYTE), 0, _PART_TAG)
            backoff.until(request.Test, sleep_s=_SLEEP_S)
