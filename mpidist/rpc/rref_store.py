"""Reference counts of remote values: the owner's table of values and forks. Pure: what is to be sent is returned as data.

**Names.** A *reference* names one value on its owner; a *fork* names one holder of it on another
worker. Both ids are unique in the job: the rank that made it, and a number of that rank. The value
lives while a fork is known, or the owner's code holds it.

**Messages**, counted per event. MPI keeps the order of two messages of one pair of ranks (MPI-4.1
§3.5), and they are taken up in that order. That is all the protocol needs, so nothing is confirmed:

========================================
=======================================================================  ========= event
messages                                                                 torch's
========================================
=======================================================================  ========= ``remote`` on
worker O, from A            REMOTE_* with reference and A's fork (A→O); REMOTE_DONE back
2 A passes it to O, its owner               none: the message itself carries the pair, O counts it
as it arrives     0 O passes it to B                          none: O counts B's fork as it writes
the message                         2 A passes it to B, neither owns it         RREF_FORK (A→O),
sent ahead of the message to B                          4 a holder drops it
RREF_USER_DELETE (holder→O)                                              1-2 ``to_here``
RREF_FETCH and RESULT                                                    2
========================================
=======================================================================  =========

**Why no value is freed too early.** A fork of B that A makes is announced by A (A→O) before A can
drop its own fork (A→O, later in the same order). So at O, B's fork is known before A's is gone,
whatever B's own messages do meanwhile.

**What may come early.** B's RREF_FETCH, or B's RREF_USER_DELETE, may reach O before A's messages. A
fetch of a reference that O does not know waits for it. A delete of a fork that O does not know is
noted, and meets its fork later; A's own fork keeps the entry until then. Deleting twice does
nothing.

**Who makes which id.** The caller of ``remote`` makes the reference and its fork; whoever passes a
reference on, or announces a fork, makes the fork. So the ids that a message brings are its sender's
own, but for references that it passes on, and deletes.

torch confirms every fork (fork request and child accept, each acknowledged) because its channels
have no such order.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from mpidist.errors import FrameError

ID_SHIFT = 40  # ids: the maker's rank above, its running number below


def new_id(rank: int, number: int) -> int:
    """Return the id of rank ``rank``'s ``number``-th reference or fork."""
    return rank << ID_SHIFT | number


def id_parts(identity: int) -> tuple[int, int]:
    """Return (the maker's rank, its running number)."""
    return identity >> ID_SHIFT, identity & ((1 << ID_SHIFT) - 1)


def require_own(source: int, ids: Iterable[int]) -> None:
    """Require that a message's sender has made ids.

    Raises:
        FrameError: It has not made one of them.
    """
    for identity in ids:
        if identity >> ID_SHIFT != source:
            raise FrameError(f"rank {source} names {identity:#x} its own, which it has not made")


class Entry:
    """A value on its owner, there already or to come.

    Attributes:
        reference: Its id.
        value: The value once ``is_set``; with ``error``, None.
        error: What its creation raised.
        forks: The known forks.
        early: Forks that were deleted before they were known.
        created: Its REMOTE_* message was seen, or its value, or this worker is about to send itself
            such a message.
        is_taken: Its REMOTE_* message was seen, or its value: no message may make it any more.
    """

    __slots__ = (
        "_waiting",
        "created",
        "early",
        "error",
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
        self.forks: set[int] = set()
        self.early: set[int] = set()
        self._waiting: list[Callable[[Entry], None]] = []

    def when_set(self, act: Callable[[Entry], None]) -> None:
        """Call ``act(entry)`` once the value is there: at once, or in the thread that sets it."""
        with _lock:
            if not self.is_set:
                self._waiting.append(act)
                return
        act(self)

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Give the value, or what its creation raised; what waits for it is called in this thread.

        Set once, it stays.
        """
        with _lock:
            if self.is_set:
                return
            self.value, self.error = value, error
            self.is_set = self.created = self.is_taken = True
            waiting, self._waiting = self._waiting, []
        for act in waiting:
            act(self)


_lock = threading.RLock()  # guards the hand-over between waiting for a value and setting it


class RRefStore:
    """One worker's entries. Thread-safe; no call blocks.

    Args:
        rank: This worker's.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._entries: dict[int, Entry] = {}
        self._lock = threading.RLock()  # a finalizer may run within any call
        self._base = new_id(rank, 0)
        self._numbers = itertools.count()  # atomic in CPython

    def make_id(self) -> int:
        """Return an id that no other call on any rank returns."""
        return self._base | next(self._numbers)

    def create(self, reference: int, fork: int) -> Entry:
        """Take up the entry of a value that this worker has itself make, before its message arrives."""
        with self._lock:
            entry = self._of(reference)
            entry.created = True
            self._count(entry, fork)
            return entry

    def create_for(self, source: int, reference: int, fork: int) -> Entry:
        """Take up the entry that a REMOTE_* message names, with its sender's fork; the value comes by ``Entry.set``.

        Raises:
            FrameError: Its sender has not made both ids, or a value has the reference already;
                nothing is kept.
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
            self._count(entry, fork)
            return entry

    def keep(self, entry: Entry, fork: int) -> None:
        """Count a fork of a value of this worker; the entry is in the table from now on."""
        with self._lock:
            self._entries[entry.reference] = entry
            self._count(entry, fork)

    def add_fork(self, reference: int, fork: int) -> None:
        """Count a fork that another worker announces."""
        with self._lock:
            entry = self._entries.get(reference)
            if entry is None or entry.early:
                self._count(self._of(reference), fork)
            else:
                entry.forks.add(fork)

    def add_forks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Count (reference, fork) pairs that other workers announce."""
        with self._lock:
            for reference, fork in pairs:
                self._count(self._of(reference), fork)

    def delete_fork(self, reference: int, fork: int) -> None:
        """Forget a fork; the last one takes the entry out of the table.

        Of one not known yet, note it.
        """
        with self._lock:
            entry = self._of(reference)
            if fork in entry.forks:
                entry.forks.discard(fork)
                self._drop_if_unused(entry)
            else:
                entry.early.add(fork)

    def redeem(self, reference: int, fork: int) -> Entry:
        """Return the entry of a reference that has come home, and forget the fork with which it came."""
        with self._lock:
            entry = self._entries.get(reference)
            if entry is not None and len(entry.forks) > 1 and fork in entry.forks:
                entry.forks.discard(fork)
                return entry
            entry = self._of(reference)
            self.delete_fork(reference, fork)
            return entry

    def find(self, reference: int) -> Entry:
        """Return the entry of a reference that is asked for; an empty one if its creation is still under way."""
        with self._lock:
            return self._of(reference)

    def counts(self) -> tuple[int, int]:
        """Return the number of entries and of their forks."""
        with self._lock:
            entries = list(self._entries.values())
            return len(entries), sum(len(entry.forks) for entry in entries)

    def leaks(self) -> list[Entry]:
        """Return the entries that somebody still holds; not what was noted of a reference that never came to be."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.forks]

    def clear(self) -> None:
        """Forget all entries."""
        with self._lock:
            self._entries.clear()

    def _of(self, reference: int) -> Entry:
        entry = self._entries.get(reference)
        if entry is None:
            entry = self._entries[reference] = Entry(reference)
        return entry

    def _count(self, entry: Entry, fork: int) -> None:
        if fork in entry.early:
            entry.early.discard(fork)
            self._drop_if_unused(entry)
        else:
            entry.forks.add(fork)

    def _drop_if_unused(self, entry: Entry) -> None:
        if not entry.forks and not entry.early and entry.created:
            self._entries.pop(entry.reference, None)
