"""Receives of the parts of an object, whose lengths its header announced: no other length is taken for the part.

The message is matched before it is received (``matched``): one of another length goes into memory
of its own, and is an error.
"""

from __future__ import annotations

import contextlib
from typing import Any

from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.errors import FrameError


class AnnouncedReceive:
    """The receive of one message; a request, as far as ``RequestWork`` is concerned.

    Args:
        space: Memory of the announced length.
    """

    def __init__(self, comm: Communicator, space: memoryview, source: int, tag: int) -> None:
        self._mpi = comm.mpi
        self._space = space
        self._from = source, tag
        self._status = MPI.Status()
        self._request: Any = None
        self._sent = space.nbytes

    def receive(self) -> None:
        """Block until it has come, whatever its length."""
        message = self._mpi.Mprobe(*self._from, self._status)
        message.Recv(self._matched())

    def Test(self) -> bool:
        """Say whether it has come, whatever its length."""
        if self._request is None:
            message = self._mpi.Improbe(*self._from, self._status)
            if message is None:
                return False
            self._request = message.Irecv(self._matched())
        return bool(self._request.Test())

    def post(self) -> None:
        """Leave the receive to MPI, as nobody tests it any more: the sender may be waiting for it."""
        # of a rank that has died; what made the caller give up says so
        with contextlib.suppress(Exception):
            if not self.Test() and self._request is None:
                self._request = self._mpi.Irecv(
                    (self._space, self._space.nbytes, MPI.BYTE), *self._from
                )

    def require_announced(self) -> None:
        """Check what has come.

        Raises:
            FrameError: It has another length.
        """
        if self._sent != self._space.nbytes:
            raise FrameError(
                f"rank {self._from[0]} sent {self._sent} bytes of an object that announces "
                f"{self._space.nbytes}"
            )

    def _matched(self) -> tuple[Any, int, Any]:
        self._sent = self._status.Get_count(MPI.BYTE)
        if self._sent != self._space.nbytes:
            self._other = bytearray(self._sent)
            return self._other, self._sent, MPI.BYTE
        return self._space, self._sent, MPI.BYTE
