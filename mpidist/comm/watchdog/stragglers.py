"""Ranks that keep the others waiting at collectives (pure).

A rank is late at a collective by the time from the arrival of the middle rank to its own. One that
is late by more than 5 % of a step at 90 % of the collectives is a straggler: the others lose that
time in each step, and a single late arrival, or a rank that is late in turns with others, is none.

A step is the time between two steps of an optimizer where those are recorded, else the period in
which the same operations repeat: all buckets of a model, once. Operations that repeat in no period
have no step, and no stragglers are looked for.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

SHARE_OF_STEP = 0.05
SHARE_OF_COLLECTIVES = 0.9
LEAST_COLLECTIVES = 10


class Straggler(NamedTuple):
    """A rank that is late again and again.

    Attributes:
        rank: The rank, in the numbers of the arrivals.
        late_ns: Its median lateness.
        share: Share of the collectives at which it was late by more than 5 % of a step.
        collectives: Their number.
    """

    rank: int
    late_ns: int
    share: float
    collectives: int


def lateness(arrivals: Mapping[int, int]) -> dict[int, int]:
    """Return the time from the arrival of the middle rank to each rank's; negative before it.

    Args:
        arrivals: Time at which each rank has entered one collective, in ns; of an even number of
            ranks the earlier of the two in the middle counts.
    """
    middle = statistics.median_low(arrivals.values())
    return {rank: time - middle for rank, time in arrivals.items()}


def found(collectives: Sequence[Mapping[int, int]], step_ns: int | None) -> list[Straggler]:
    """Return the stragglers, the latest first.

    Args:
        collectives: The arrivals at each collective, by rank, in ns.
        step_ns: Duration of a step; None if it is not known.
    """
    if step_ns is None or len(collectives) < LEAST_COLLECTIVES:
        return []
    by_rank: dict[int, list[int]] = {}
    for arrivals in collectives:
        for rank, late in lateness(arrivals).items():
            by_rank.setdefault(rank, []).append(late)
    stragglers = []
    for rank, times in by_rank.items():
        count = sum(late > SHARE_OF_STEP * step_ns for late in times)
        if count >= SHARE_OF_COLLECTIVES * len(collectives):
            late = int(statistics.median(times))
            share = count / len(collectives)
            stragglers.append(Straggler(rank, late, share, len(collectives)))
    return sorted(stragglers, key=lambda straggler: -straggler.late_ns)


def sentence(straggler: Straggler, group: str, host: str, step_ns: int) -> str:
    """Return a straggler in words.

    Args:
        straggler: The rank.
        group: Name of the group.
        host: Node of the rank.
        step_ns: Duration of a step.
    """
    late_ms, step_ms = straggler.late_ns / 1e6, step_ns / 1e6
    return (
        f"rank {straggler.rank} on {host} is late at {straggler.share:.0%} of "
        f'{straggler.collectives} collectives of group "{group}": by {late_ms:.3g} ms of a step of '
        f"{step_ms:.3g} ms"
    )


def step_of(operations: Sequence[Hashable], begins_ns: Sequence[int]) -> int | None:
    """Return the duration of the shortest period in which operations repeat; None without one.

    If the whole does not repeat, halves are looked at, then quarters and eighths, the last ones
    first: a program begins with other operations, and evaluates now and then.

    Args:
        operations: What distinguishes each operation, in order.
        begins_ns: Time at which each has begun.
    """
    whole = list(operations)
    for parts in (1, 2, 4, 8):
        length = len(whole) // parts
        if length < LEAST_COLLECTIVES:
            return None
        for end in range(len(whole), length - 1, -length):
            period = _period_of(whole[end - length : end])
            if period:
                times = begins_ns[end - length : end]
                return int(
                    statistics.median(
                        later - earlier
                        for earlier, later in zip(times, times[period:], strict=False)
                    )
                )
    return None


def _period_of(operations: list[Hashable]) -> int:
    """Return the least number of operations that repeats at least three times; 0 for none."""
    periods = range(1, len(operations) // 3 + 1)
    return next((one for one in periods if operations[one:] == operations[:-one]), 0)


def interval_of(begins_ns: Sequence[int]) -> int | None:
    """Return the median time between successive begins; None for fewer than three."""
    if len(begins_ns) < 3:
        return None
    return int(
        statistics.median(later - earlier for earlier, later in itertools.pairwise(begins_ns))
    )
