"""Matched receive of a part of an object, whose length the object's header has announced.

A matched probe returns the length of the message before the receive. A message of another length is
received into memory of its own, and is an error.

Source: MPI-4.1 §3.8.2 and §3.8.3 (matching probe, matched receives).
"""

from __future__ import annotations

import contextlib

from mpidist.comm.memory.buffer import Buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request
from mpidist.errors import FrameError


class MatchedReceive:
    """Receive of one message, with the methods of a request that ``RequestWork`` calls.

    Args:
        space: Memory of the announced length.
    """

    def __init__(self, comm: Communicator, space: memoryview, source: int, tag: int) -> None:
        self._mpi = comm.mpi
        self._space = space
        self._source_and_tag = source, tag
        self._status = MPI.Status()
        self._request: Request | None = None
        self._sent = space.nbytes

    def receive(self) -> None:
        """Receive the message, of whatever length, with blocking calls of MPI."""
        message = self._mpi.Mprobe(*self._source_and_tag, self._status)
        message.Recv(self._matched())

    def Test(self) -> bool:
        """Return whether the message, of whatever length, is received."""
        if self._request is None:
            message = self._mpi.Improbe(*self._source_and_tag, self._status)
            if message is None:
                return False
            self._request = message.Irecv(self._matched())
        return bool(self._request.Test())

    def post(self) -> None:
        """Post the receive, because the sender may wait for it; no thread tests it any more."""
        # The caller raises its own error, also if the sender has died.
        with contextlib.suppress(Exception):
            if not self.Test() and self._request is None:
                self._request = self._mpi.Irecv(
                    (self._space, self._space.nbytes, MPI.BYTE), *self._source_and_tag
                )

    def require_announced(self) -> None:
        """Compare the lengths of the message and of the memory.

        Raises:
            FrameError: They differ.
        """
        if self._sent != self._space.nbytes:
            raise FrameError(
                f"rank {self._source_and_tag[0]} sent {self._sent} bytes of an object that "
                f"announces {self._space.nbytes}"
            )

    def _matched(self) -> Buffer:
        self._sent = self._status.Get_count(MPI.BYTE)
        if self._sent != self._space.nbytes:
            # Kept as long as the request.
            self._other = bytearray(self._sent)
            return self._other, self._sent, MPI.BYTE
        return self._space, self._sent, MPI.BYTE
