"""Communicators of closed groups: freed when no message can reach them any more.

A rank does not wait for the others when it closes a group, so a message of a slower rank may arrive
later. Open MPI keeps a message for a freed communicator and delivers it to the next one with the
same number, where a new message is lost in its place; and a thread that polls during MPI_Comm_free
may read freed memory. So a closed communicator is kept until

* eight more were closed, after which no thread works on its last messages;
* an MPI_Ibarrier, which each rank starts when it closes the group, has completed: every member has
  closed it, and sends no more. Where a member never closes it (its call has failed, or it has
  ended), the barrier stays incomplete and the communicator is lost, as on that member;
* three successive probes have found no message, and those found are received.

MPI ends with the rest of them: nothing waits for a barrier.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request

KEPT = 8  # closed after a communicator before it is freed
_EMPTY_PROBES = 3


class ClosedCommunicators:
    """The communicators that this process has closed and not freed, in the order of closing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed: deque[_Closed] = deque()
        # Kept alive, because MPI may still work on their requests.
        self._lost: list[_Closed] = []

    def add(self, mpi: Mpi, children: Sequence[Mpi] = ()) -> None:
        """Take a communicator that this rank uses no more; free older ones that are due.

        Collective: over the communicator, as its last operation. Blocks: no.

        Args:
            mpi: The communicator.
            children: Communicators that were made from it and used together with it.
        """
        with self._lock:
            self._closed.append(_Closed(mpi, children))
            unfinished: list[_Closed] = []
            for _ in range(len(self._closed) - KEPT):
                closed = self._closed.popleft()
                try:
                    if not closed.free():
                        unfinished.append(closed)
                except Exception:  # a member has died, or has revoked the communicator (ULFM)
                    self._lost.append(closed)
            self._closed.extendleft(reversed(unfinished))


class _Closed:
    """A closed communicator, its barrier, and its late messages."""

    def __init__(self, mpi: Mpi, children: Sequence[Mpi]) -> None:
        self._mpi = mpi
        self._children = children
        self._receives: list[tuple[Request, bytearray]] = []
        self._barrier: Request | None = None
        self._error: Exception | None = None
        try:
            self._barrier = mpi.Ibarrier()
        except Exception as error:
            self._error = error

    def free(self) -> bool:
        """Free the communicator and its children if no message can reach them; say whether.

        Raises:
            Exception: MPI reports a failed rank; the communicator must not be freed.
        """
        if self._error is not None:
            raise self._error
        if self._barrier is not None:
            if not self._barrier.Test():
                return False
            self._barrier = None
        for length, message in late_messages(self._mpi):
            space = bytearray(length)
            self._receives.append((message.Irecv((space, length, MPI.BYTE)), space))
        while self._receives:
            if not self._receives[-1][0].Test():
                return False
            self._receives.pop()
        for mpi in (*self._children, self._mpi):
            mpi.Free()
        return True


def late_messages(mpi: Mpi) -> Iterator[tuple[int, MPI.Message | MatchedMessage]]:
    """Match all messages that have arrived; yield length and message of each."""
    # The first probe that finds nothing has polled once, and a later one finds what that brought.
    status, empty = MPI.Status(), 0
    while empty < _EMPTY_PROBES:
        message = mpi.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            empty += 1
        else:
            empty = 0
            yield status.Get_count(MPI.BYTE), message


_closed = ClosedCommunicators()


def add(mpi: Mpi, children: Sequence[Mpi] = ()) -> None:
    """Keep a communicator that this rank uses no more, and free it later.

    Collective: over the communicator, as its last operation. Blocks: no.
    """
    _closed.add(mpi, children)
