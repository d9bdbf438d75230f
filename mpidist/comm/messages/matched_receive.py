"""Matched receive of a part of an object, whose length the object's header has announced.

A matched probe returns the length of the message before the receive. A message of another length is
received into memory of its own, and is an error.

Source: MPI-4.1 §3.8.2 and §3.8.3 (matching probe, matched receives).
"""

from __future__ import annotations

from mpidist.comm.memory.buffer import Buffer
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request
from mpidist.errors import FrameError


class MatchedReceive:
    """Receive of one message.

    Args:
        space: Memory of the announced length; None if there is none.
    """

    def __init__(
        self, mpi: Mpi, space: memoryview | None, nbytes: int, source: int, tag: int
    ) -> None:
        self._mpi = mpi
        self._space = space
        self._announced = nbytes
        self._source_and_tag = source, tag
        self._status = MPI.Status()
        self._message: MPI.Message | MatchedMessage | None = None
        self._request: Request | None = None

    def receive(self) -> None:
        """Receive the message, of whatever length, with blocking calls of MPI."""
        message = self._mpi.Mprobe(*self._source_and_tag, self._status)
        message.Recv(self._matched())

    def Test(self) -> bool:
        """Return whether the message, of whatever length, is received."""
        # Each result is stored by the step of an iterator that has it: after an exception of a
        # signal's handler the next test goes on.
        if self._request is None:
            if self._message is None:
                source, tag = self._source_and_tag
                for message in map(self._mpi.Improbe, (source,), (tag,), (self._status,)):
                    self._message = message
                if self._message is None:
                    return False
            for request in map(self._message.Irecv, (self._matched(),)):
                self._request = request
        assert self._request is not None
        return bool(self._request.Test())

    def problem(self) -> FrameError | None:
        """Return the error of a message that has another length than announced."""
        sent = self._status.Get_count(MPI.BYTE)
        if sent == self._announced:
            return None
        return FrameError(
            f"rank {self._source_and_tag[0]} sent {sent} bytes of an object that announces "
            f"{self._announced}"
        )

    def _matched(self) -> Buffer:
        sent = self._status.Get_count(MPI.BYTE)
        if self._space is None or sent != self._announced:
            # Kept as long as the request.
            self._other = bytearray(sent)
            return self._other, sent, MPI.BYTE
        return self._space, sent, MPI.BYTE
