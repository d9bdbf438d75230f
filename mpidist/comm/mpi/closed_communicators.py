"""Communicators of closed groups: freed when no message can reach them any more.

A rank does not wait for the others when it closes a group, so a message of a slower rank may arrive
later. Open MPI keeps a message for a freed communicator and delivers it to the next one with the
same number, where a new message is lost in its place; and a thread that polls during MPI_Comm_free
may read freed memory. So a closed communicator is kept until

* eight more were closed, after which no thread works on its last messages;
* a barrier, which each rank starts when it closes the group, has completed: every member has closed
  it, and sends no more. Where a member never closes it (its call has failed, or it has ended), the
  barrier stays incomplete and the communicator is lost, as on that member;
* three successive probes have found no message, and those found are received.

The barrier is of messages with a tag of its own: an MPI_Ibarrier would match a collective that
another rank has called and this one has not, which would then return with a wrong result.

MPI ends with the rest of them: nothing waits for a barrier.

Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988 (dissemination).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi, Request

KEPT = 8  # closed after a communicator before it is freed
_EMPTY_PROBES = 3


class ClosedCommunicators:
    """The communicators that this process has closed and not freed, in the order of closing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed: deque[_Closed] = deque()
        self._incomplete: list[_Closed] = []  # of these, with a barrier under way
        # Kept alive, because MPI may still work on their requests.
        self._lost: list[_Closed] = []

    def add(
        self, mpi: Mpi, tag: int, children: Sequence[Mpi] = (), ended: Collection[int] = ()
    ) -> None:
        """Take a communicator that this rank uses no more; free older ones that are due.

        Each member calls this once, as its last use of the communicator. Blocks: no.

        Args:
            mpi: The communicator.
            tag: A tag that nothing else uses.
            children: Communicators that were made from it and used together with it.
            ended: Ranks whose message with the tag this rank has received.
        """
        with self._lock:
            # A round of a barrier takes an answer: those that are not due advance, too.
            closed = _Closed(mpi, _Barrier(mpi, tag, ended), children)
            self._closed.append(closed)
            self._incomplete.append(closed)
            self._incomplete = [one for one in self._incomplete if not one.advance()]
            unfinished: list[_Closed] = []
            for _ in range(len(self._closed) - KEPT):
                closed = self._closed.popleft()
                try:
                    if not closed.free():
                        unfinished.append(closed)
                except Exception:  # a member has died, or has revoked the communicator (ULFM)
                    self._lost.append(closed)
            self._closed.extendleft(reversed(unfinished))

    def kept(self) -> list[Mpi]:
        """Return the communicators that are not freed, without lost ones."""
        with self._lock:
            return [closed.mpi for closed in self._closed]


class _Barrier:
    """Barrier over a communicator by messages without content; ``Test`` advances it.

    In round k a rank sends to the rank 2^k above it and receives from the rank 2^k below it, after
    that of round k - 1. Each of a rank's senders is another one.
    """

    def __init__(self, mpi: Mpi, tag: int, received: Collection[int]) -> None:
        self._mpi, self._tag = mpi, tag
        self._received = set(received)
        rank, size = mpi.Get_rank(), mpi.Get_size()
        distances = [1 << k for k in range((size - 1).bit_length())]
        # Receiver and sender of each round.
        self._rounds = deque(
            ((rank + distance) % size, (rank - distance) % size) for distance in distances
        )
        self._is_sent = False  # this rank's message of the first of them
        self._sends: list[Request] = []

    def Test(self) -> bool:
        """Return whether all ranks have come."""
        while self._rounds:
            to, source = self._rounds[0]
            if not self._is_sent:
                self._sends.append(self._mpi.Isend((b"", 0, MPI.BYTE), to, self._tag))
                self._is_sent = True
            if not self._has_come(source):
                return False
            self._rounds.popleft()
            self._is_sent = False
        while self._sends and self._sends[-1].Test():
            self._sends.pop()
        return not self._sends

    def _has_come(self, source: int) -> bool:
        if source in self._received:
            return True
        message = self._mpi.Improbe(source, self._tag, MPI.Status())
        if message is None:
            return False
        message.Recv((bytearray(), 0, MPI.BYTE))
        return True


class _Closed:
    """A closed communicator, its barrier, and its late messages."""

    def __init__(self, mpi: Mpi, barrier: _Barrier, children: Sequence[Mpi]) -> None:
        self.mpi = mpi
        self._children = children
        self._receives: list[tuple[Request, bytearray]] = []
        self._barrier = barrier
        self._is_complete = False
        self._error: Exception | None = None

    def advance(self) -> bool:
        """Advance the barrier; return whether it has ended. ``free`` raises its error."""
        try:
            self._is_complete = self._barrier.Test()
        except Exception as error:
            self._error = error
        return self._is_complete or self._error is not None

    def free(self) -> bool:
        """Free the communicator and its children if no message can reach them; say whether.

        Raises:
            Exception: MPI reports a failed rank; the communicator must not be freed.
        """
        if self._error is not None:
            raise self._error
        if not self._is_complete:
            return False
        self._receives += late_receives(self.mpi)
        while self._receives:
            if not self._receives[-1][0].Test():
                return False
            self._receives.pop()
        for mpi in (*self._children, self.mpi):
            mpi.Free()
        return True


def late_receives(mpi: Mpi) -> Iterator[tuple[Request, bytearray]]:
    """Receive all messages that have arrived; yield request and memory of each."""
    # The first probe that finds nothing has polled once, and a later one finds what that brought.
    status, empty = MPI.Status(), 0
    while empty < _EMPTY_PROBES:
        message = mpi.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            empty += 1
        else:
            empty = 0
            length = status.Get_count(MPI.BYTE)
            space = bytearray(length)
            yield message.Irecv((space, length, MPI.BYTE)), space


_closed = ClosedCommunicators()


def add(mpi: Mpi, tag: int, children: Sequence[Mpi] = (), ended: Collection[int] = ()) -> None:
    """Keep a communicator that this rank uses no more, and free it later.

    See ``ClosedCommunicators.add``.
    """
    _closed.add(mpi, tag, children, ended)


def kept() -> list[Mpi]:
    """Return the communicators that this process has closed and not freed."""
    return _closed.kept()
