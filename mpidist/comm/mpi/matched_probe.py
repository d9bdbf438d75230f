"""Receives by matched probe (MPI-4.1 §3.8.2): the length is compared before bytes are received.

Open MPI over shared memory copies all of a message past 4 KiB into a shorter receive, and reports
the truncation afterwards: memory after the receive buffer is overwritten. So a receive whose
message another rank's arguments decide is never posted. The message is matched first, and a message
of another length goes into memory of its own, because its sender waits until it is received.
"""

from __future__ import annotations

from typing import Any

from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI


class LengthError(Exception):
    """A message whose length contradicts this rank's arguments.

    ``Execution`` adds rank, group and operation.
    """

    @classmethod
    def of(cls, source: int, sent: int, expected: int) -> LengthError:
        """Return the error for ``sent`` bytes from rank ``source`` in place of ``expected``."""
        return cls(f"rank {source} sent {sent} bytes, and this rank expected {expected}")


class Receives:
    """The blocking receives of one collective; ``end`` raises the first wrong length.

    All messages are received before that, because the other ranks wait for it.

    Attributes:
        wrong: Bytes that a rank has sent in place of the expected ones, by rank.
    """

    def __init__(self, comm: Communicator) -> None:
        self._mpi = comm.mpi
        self._status = MPI.Status()
        self._error: LengthError | None = None
        self.wrong: dict[int, int] = {}

    def receive(self, space: tuple[Any, int, MPI.Datatype], source: int, tag: int) -> None:
        """Receive one message.

        Args:
            space: Memory, its length in bytes, ``MPI.BYTE``.
            source: The sender's rank.
            tag: The message's tag.
        """
        message = self._mpi.Mprobe(source, tag, self._status)
        sent = self._status.Get_count(MPI.BYTE)
        if sent == space[1]:
            message.Recv(space)
            return
        message.Recv((bytearray(sent), sent, MPI.BYTE))
        self.wrong.setdefault(source, sent)
        if self._error is None:
            self._error = LengthError.of(source, sent, space[1])

    def is_wrong(self) -> bool:
        """Return whether a message had another length."""
        return self._error is not None

    def end(self) -> None:
        """Raise the first error.

        Raises:
            LengthError: A message had another length.
        """
        if self._error is not None:
            raise self._error
