"""Reference counts of remote values: the owner's table of values and forks. Pure: nothing is sent.

**Names.** A *reference* names one value on its owner; a *fork* names one holder of the value on
another worker. Both ids are unique in the job: the rank that has made the id, and a number of that
rank. The value lives while a fork is known, or while the owner's code holds it.

**Messages**, counted per event. MPI keeps the order of two messages of one pair of ranks (MPI-4.1
§3.5), and RPC handles them in that order. The protocol needs nothing else, so no message is
confirmed (torch's counts in the last column):

==============================  ==========================================================  =======
event                           messages                                                    torch
==============================  ==========================================================  =======
``remote`` on worker O, from A  REMOTE_* with reference and A's fork (A→O); REMOTE_DONE     2
A passes it to O, its owner     none: O counts the pair in the message as it arrives        0
O passes it to B                none: O counts B's fork as it writes the message            2
A passes it to B, both users    RREF_FORK (A→O), sent ahead of the message to B             4
a holder drops it               RREF_USER_DELETE (holder→O)                                 1-2
``to_here``                     RREF_FETCH and RESULT                                       2
==============================  ==========================================================  =======

**Why no value is freed too early.** A fork of B that A makes is announced by A (A→O) before A can
drop its own fork (A→O, later in the same order). So at O, B's fork is known before A's is gone,
whatever B's own messages do meanwhile.

**What may arrive early.** B's RREF_FETCH, or B's RREF_USER_DELETE, may reach O before A's messages.
A fetch of a reference that O does not know waits for it. A delete of a fork that O does not know is
kept until the fork is announced; A's own fork keeps the entry until then. Deleting twice does
nothing.

**Which rank makes which id.** The caller of ``remote`` makes the reference and its fork; the worker
that passes a reference on, or announces a fork, makes that fork. So the ids in a message are its
sender's own, except for references that are passed on, and deletes.

torch confirms every fork (fork request and child accept, each acknowledged) because its channels
have no such order.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpidist.comm.memory.stream import Event
from mpidist.errors import FrameError

# An id: the rank that has made it in the upper bits, a running number in the lower ones.
ID_SHIFT = 40


def new_id(rank: int, number: int) -> int:
    """Return the id of rank ``rank``'s ``number``-th reference or fork."""
    return rank << ID_SHIFT | number


def id_parts(identity: int) -> tuple[int, int]:
    """Return the rank that has made an id, and its running number."""
    return identity >> ID_SHIFT, identity & ((1 << ID_SHIFT) - 1)


def require_own(source: int, ids: Iterable[int]) -> None:
    """Check that the sender of a message has made the ids in it.

    Raises:
        FrameError: It has not made one of them.
    """
    for identity in ids:
        if identity >> ID_SHIFT != source:
            raise FrameError(f"rank {source} names {identity:#x} its own, which it has not made")


class Entry:
    """A value on its owner; the value may not be set yet.

    Attributes:
        reference: Its id.
        value: The value once ``is_set``; None if there is an ``error``. See ``value_here``.
        error: The exception of its creation.
        forks: The known forks, with the ranks of their holders.
        early: Forks that were deleted before they were known.
        events: Behind the work on devices that computes the value.
        created: Its REMOTE_* message has arrived, its value is set, or this worker is about to send
            itself such a message.
        is_taken: Its REMOTE_* message has arrived, or its value is set: a second REMOTE_* message
            with this reference is an error.
    """

    __slots__ = (
        "_waiting",
        "created",
        "early",
        "error",
        "events",
        "forks",
        "is_set",
        "is_taken",
        "reference",
        "value",
    )

    def __init__(self, reference: int) -> None:
        self.reference = reference
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_set = self.is_taken = self.created = False
        # Dicts of numbers and a tuple, in place of sets and a list: the garbage collector does not
        # scan them, and a worker may own many values.
        self.forks: dict[int, int] = {}
        self.early: dict[int, None] = {}
        self.events: Sequence[Event] = ()
        self._waiting: tuple[Callable[[Entry], None], ...] = ()

    def when_set(self, act: Callable[[Entry], None]) -> None:
        """Call ``act(entry)`` once the value is set: immediately, or in the thread that sets it."""
        with _lock:
            if not self.is_set:
                self._waiting = (*self._waiting, act)
                return
        act(self)

    def value_here(self) -> Any:
        """Return the value; the calling thread's current streams wait for the work behind it."""
        for event in self.events:
            event.block_current_stream()
        return self.value

    def set(
        self,
        value: object = None,
        error: BaseException | None = None,
        events: Sequence[Event] = (),
    ) -> None:
        """Set the value, or the error of its creation, and run the callbacks of ``when_set``.

        A second call does nothing.
        """
        with _lock:
            if self.is_set:
                return
            self.value, self.error, self.events = value, error, events
            self.is_set = self.created = self.is_taken = True
            waiting, self._waiting = self._waiting, ()
        for act in waiting:
            act(self)


_lock = threading.RLock()  # guards ``is_set`` together with the callbacks


class RRefStore:
    """The entries of one worker. Thread-safe; no call blocks.

    Args:
        rank: This worker's rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._entries: dict[int, Entry] = {}
        self._lock = threading.RLock()  # reentrant: a finalizer may run within any call
        self._base = new_id(rank, 0)
        self._numbers = itertools.count()  # next() is atomic in CPython

    def make_id(self) -> int:
        """Return an id that no other call on any rank returns."""
        return self._base | next(self._numbers)

    def create(self, reference: int, fork: int) -> Entry:
        """Create the entry for a call of ``remote`` to this worker, before its message arrives."""
        with self._lock:
            entry = self._of(reference)
            entry.created = True
            self._count(entry, fork, self.rank)
            return entry

    def create_for(self, source: int, reference: int, fork: int) -> Entry:
        """Create the entry of a REMOTE_* message, with its sender's fork.

        Raises:
            FrameError: The sender has not made both ids, or a value has the reference already;
                nothing is changed.
        """
        if reference >> ID_SHIFT != source or fork >> ID_SHIFT != source:
            require_own(source, (reference, fork))
        with self._lock:
            entry = self._of(reference)
            if entry.is_taken:
                raise FrameError(
                    f"rank {source} has a value made as {reference:#x}, which there is already"
                )
            entry.created = entry.is_taken = True
            self._count(entry, fork, source)
            return entry

    def keep(self, entry: Entry, fork: int, holder: int) -> None:
        """Count a fork of an owned value, for a holder, and enter the value into the table."""
        with self._lock:
            self._entries[entry.reference] = entry
            self._count(entry, fork, holder)

    def add_forks(self, pairs: Iterable[tuple[int, int]], holder: int) -> None:
        """Count (reference, fork) pairs that another worker announces, for a holder."""
        with self._lock:
            for reference, fork in pairs:
                entry = self._entries.get(reference)
                if entry is None or entry.early:
                    self._count(self._of(reference), fork, holder)
                else:
                    entry.forks[fork] = holder

    def delete_fork(self, reference: int, fork: int) -> None:
        """Delete a fork; the last one removes the entry from the table.

        The delete of a fork that is not known yet is kept until the fork is announced.
        """
        with self._lock:
            entry = self._of(reference)
            if fork in entry.forks:
                del entry.forks[fork]
                self._drop_if_unused(entry)
            else:
                entry.early[fork] = None

    def delete_forks_of(self, holder: int) -> None:
        """Delete the forks of a holder that has left, also those that others have announced."""
        with self._lock:
            for entry in list(self._entries.values()):
                gone = [fork for fork, rank in entry.forks.items() if rank == holder]
                for fork in gone:
                    del entry.forks[fork]
                if gone:
                    self._drop_if_unused(entry)

    def redeem(self, reference: int, fork: int) -> Entry:
        """Return the entry of a reference that was passed to its owner, and delete its fork."""
        with self._lock:
            entry = self._entries.get(reference)
            if entry is not None and len(entry.forks) > 1 and fork in entry.forks:
                del entry.forks[fork]
                return entry
            entry = self._of(reference)
            self.delete_fork(reference, fork)
            return entry

    def find(self, reference: int) -> Entry:
        """Return the entry of a reference; a new one, without value, if it is not known yet."""
        with self._lock:
            return self._of(reference)

    def counts(self) -> tuple[int, int]:
        """Return the number of entries and of their forks."""
        with self._lock:
            entries = list(self._entries.values())
            return len(entries), sum(len(entry.forks) for entry in entries)

    def leaks(self) -> list[Entry]:
        """Return the entries with known forks."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.forks]

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()

    def _of(self, reference: int) -> Entry:
        entry = self._entries.get(reference)
        if entry is None:
            entry = self._entries[reference] = Entry(reference)
        return entry

    def _count(self, entry: Entry, fork: int, holder: int) -> None:
        if fork in entry.early:
            del entry.early[fork]
            self._drop_if_unused(entry)
        else:
            entry.forks[fork] = holder

    def _drop_if_unused(self, entry: Entry) -> None:
        if not entry.forks and not entry.early and entry.created:
            self._entries.pop(entry.reference, None)
