"""Chains of calls under way (pure): a thread waits for a call, whose handler waits for a call, ...

A call has the same number at its caller and at its handler, so the entries under way of all ranks
are a graph of threads. A chain ends at a handler that waits for no call. If that handler waits for
a lock, each other thread of its process that waits for a call may hold the lock, and the chain goes
on there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpidist.comm.recorder.recording import Entry, Kind

Thread = tuple[int, int]  # world rank, and the kernel's number of the thread


class Step(NamedTuple):
    """A call under way.

    Attributes:
        rank: World rank of the caller.
        call: Its entry at the caller.
        may_hold: The caller is not the handler of the call before, but a thread that may hold the
            lock for which that handler waits.
    """

    rank: int
    call: Entry
    may_hold: bool = False


@dataclass(frozen=True)
class Chain:
    """Calls under way, each made by the handler of the one before.

    Attributes:
        steps: The calls, the first caller's first.
        handler: Entry of the last call's handler; None if it does not run.
        inner: What the handler is in; the handler's own entry if it is in no other.
        lock: Place at which the handler waits for a lock; "" if it waits for none; None if its
            stack is not known.
        closed_at: Index of the step whose caller may hold the lock; None if none does.
    """

    steps: tuple[Step, ...]
    handler: Entry | None = None
    inner: Entry | None = None
    lock: str | None = None
    closed_at: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the world ranks of the callers, and that of the last call's callee."""
        return (*(step.rank for step in self.steps), self.steps[-1].call.peer)

    @property
    def circle(self) -> tuple[int, ...]:
        """Return the ranks of a circle of waits, the first again as the last; empty without one.

        A handler whose stack is not known counts as one that waits.
        """
        ranks = self.ranks
        first = ranks.index(ranks[-1]) if self.closed_at is None else self.closed_at
        is_waiting = self.handler is not None and self.inner is self.handler and self.lock != ""
        return ranks[first:] if is_waiting and len(ranks) - first > 1 else ()


@dataclass
class _Threads:
    """Entries under way, by their threads and by the numbers of calls."""

    innermost: dict[Thread, Entry] = field(default_factory=dict)
    handlers: dict[tuple[int, int], tuple[Thread, Entry]] = field(default_factory=dict)
    # Calls, each with the handler that makes it, if one does.
    calls: list[tuple[Thread, Entry, Entry | None]] = field(default_factory=list)

    def add(self, rank: int, entries: Sequence[Entry]) -> None:
        handling: dict[int, Entry] = {}
        for entry in sorted(entries, key=lambda entry: entry.number):
            thread = rank, entry.thread
            if entry.kind is Kind.HANDLER:
                self.handlers[entry.peer, entry.tag] = thread, entry
                handling[entry.thread] = entry
            elif entry.kind is Kind.CALL:
                self.calls.append((thread, entry, handling.get(entry.thread)))
            self.innermost[thread] = entry

    def roots(self) -> list[tuple[Thread, Entry]]:
        """Return the calls that no handler has made, or one whose caller has given up."""
        awaited = {(thread[0], call.tag) for thread, call, _ in self.calls}
        return [
            (thread, call)
            for thread, call, handler in self.calls
            if handler is None or (handler.peer, handler.tag) not in awaited
        ]


def chains(
    under_way: Mapping[int, Sequence[Entry]], locks: Mapping[Thread, str] | None = None
) -> list[Chain]:
    """Return the chain of each call under way that is not within another; circles come first.

    Args:
        under_way: Entries that have not ended, by world rank.
        locks: Of threads whose stack is known: the place at which they wait for a lock, or "".
    """
    threads = _Threads()
    for rank, entries in under_way.items():
        threads.add(rank, [entry for entry in entries if entry.end_ns is None])
    found = [
        _followed(threads, locks or {}, (Step(thread[0], call),), frozenset({thread}))
        for thread, call in threads.roots()
    ]
    # Sorting is stable: the lowest rank of equals comes first.
    return sorted(found, key=lambda chain: (not chain.circle, -len(chain.steps)))


def _followed(
    threads: _Threads,
    locks: Mapping[Thread, str],
    steps: tuple[Step, ...],
    seen: frozenset[Thread],
) -> Chain:
    """Return the chain that begins with these steps, whose callers' threads are ``seen``."""
    while True:
        rank, call, _ = steps[-1]
        if (rank, call.tag) not in threads.handlers:
            return Chain(steps)
        thread, handler = threads.handlers[rank, call.tag]
        inner = threads.innermost[thread]
        if inner.kind is not Kind.CALL or thread in seen:
            break
        seen |= {thread}
        steps = (*steps, Step(thread[0], inner))
    lock = locks.get(thread)
    if not lock or inner is not handler:
        return Chain(steps, handler, inner, lock)
    callers = {
        holder: entry
        for holder, entry in threads.innermost.items()
        if holder[0] == thread[0] and holder != thread and entry.kind is Kind.CALL
    }
    for index, step in enumerate(steps):
        if callers.get((step.rank, step.call.thread)) is step.call:
            return Chain(steps, handler, inner, lock, index)
    further = [
        _followed(threads, locks, (*steps, Step(holder[0], call, True)), seen | {holder})
        for holder, call in callers.items()
        if holder not in seen
    ]
    closed = [chain for chain in further if chain.closed_at is not None]
    return (closed or [Chain(steps, handler, inner, lock)])[0]


def arrows(ranks: Sequence[int], names: Mapping[int, str]) -> str:
    """Return ``worker0 -> worker1 -> worker0``; a worker without a name is ``rank 0``."""
    return " -> ".join(_name(rank, names) for rank in ranks)


def sentences(chain: Chain, names: Mapping[int, str], now_ns: Mapping[int, int]) -> list[str]:
    """Return a sentence for each call of a chain, and one for the last handler.

    Args:
        names: Of workers, by world rank.
        now_ns: Time of the monotonic clock of each rank's node.
    """
    lines = []
    for index, (rank, call, may_hold) in enumerate(chain.steps):
        who = _name(rank, names)
        if index and not may_hold:
            who += ", as its handler,"
        elif may_hold:
            who += ", in a thread that may hold the lock,"
        seconds = (now_ns[rank] - call.begin_ns) / 1e9
        lines.append(
            f"{who} waits {seconds:.1f} s for {call.operation} of {_name(call.peer, names)}"
        )
    return [*lines, _end(chain, names)]


def _end(chain: Chain, names: Mapping[int, str]) -> str:
    who = _name(chain.ranks[-1], names)
    if chain.handler is None or chain.inner is None:
        return f"{who} has not begun it, or has ended it"
    if chain.inner is not chain.handler:
        inner = chain.inner
        number = f" number {inner.sequence}" if inner.sequence else ""
        group = f' of group "{inner.group}"' if inner.group else ""
        return f"{who} is in {inner.operation}{number}{group} there"
    if not chain.lock:
        return f"{who} runs it" + ("" if chain.lock == "" else ", or waits for a lock there")
    holder = ""
    if chain.closed_at is not None:
        step = chain.steps[chain.closed_at]
        holder = f"; the thread in {step.call.operation} may hold it"
    return f"{who} waits for a lock there, at {chain.lock}{holder}"


def _name(rank: int, names: Mapping[int, str]) -> str:
    return names.get(rank, f"rank {rank}")
