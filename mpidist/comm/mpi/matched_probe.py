"""Receives by matched probe (MPI-4.1 §3.8.2): the length of a message is compared before any byte of it is received.

Open MPI over shared memory copies all of a message past 4 KiB into a shorter receive, and reports
the truncation afterwards: the memory behind the receive is lost. So a receive whose message another
rank's arguments decide is never posted: the message is matched first, and one of another length
goes into memory of its own, so that its sender is not left waiting.
"""

from __future__ import annotations

from typing import Any

from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI


class LengthError(Exception):
    """A message of another length than this rank's arguments say; ``Execution`` names rank, group and operation."""

    @classmethod
    def of(cls, source: int, sent: int, expected: int) -> LengthError:
        """Return the error for ``sent`` bytes of rank ``source`` in the place of ``expected``."""
        return cls(f"rank {source} sent {sent} bytes, and this rank expected {expected}")


class Receives:
    """The receives of one collective: each blocks until it has ended, and the first wrong length is raised at the end.

    All messages are received before that, because the other ranks wait for it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._mpi = comm.mpi
        self._status = MPI.Status()
        self._error: LengthError | None = None

    def receive(self, space: tuple[Any, int, Any], source: int, tag: int) -> None:
        """Receive one message.

        Args:
            space: Memory, its length in bytes, ``MPI.BYTE``.
        """
        message = self._mpi.Mprobe(source, tag, self._status)
        sent = self._status.Get_count(MPI.BYTE)
        if sent == space[1]:
            message.Recv(space)
            return
        message.Recv((bytearray(sent), sent, MPI.BYTE))
        if self._error is None:
            self._error = LengthError.of(source, sent, space[1])

    def end(self) -> None:
        """Raise what was noted.

        Raises:
            LengthError: The first message of another length.
        """
        if self._error is not None:
            raise self._error
