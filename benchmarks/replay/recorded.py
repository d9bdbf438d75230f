"""Plan of a step from a recorded timeline (``MPIDIST_TRACE``), to be replayed on more nodes. Pure.

A training repeats its step, and so the bytes of its all-reduces. The period of these is found in
one rank's events; a step lasts from the end of one period's last all-reduce to the end of the next
period's. A bucket is ready where its all-reduce began. What the main thread spent in communication,
and in waits for it, is no computing. The middle step by its computing is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.trace.chrome_file import Reading
from replay.traces import StepPlan

_COMMUNICATION = ("collective", "wait", "send", "receive")
_LEAST_PERIODS = 3


class _Slice(NamedTuple):
    begin_us: float
    end_us: float
    nbytes: int


def plan(path: Path, rank: int = 0) -> StepPlan:
    """Return the step of a timeline's rank.

    Raises:
        ValueError: It is no timeline, or has fewer than three equal steps of all-reduces.
        OSError: It cannot be read.
    """
    return plan_of(Reading(path).events(), rank)


def plan_of(events: Iterable[Mapping[str, Any]], rank: int = 0) -> StepPlan:
    """Return the step of a rank's events in Chrome's form.

    Raises:
        ValueError: There are fewer than three equal steps of all-reduces.
    """
    main: set[int] = set()
    reduced: list[_Slice] = []
    on_main: list[tuple[int, _Slice]] = []
    for event in events:
        if event.get("pid") != rank:
            continue
        about = event.get("args", {})
        if event.get("name") == "thread_name" and about.get("is_main"):
            main.add(event["tid"])
        if event.get("ph") != "X" or event.get("cat") not in _COMMUNICATION:
            continue
        found = _Slice(event["ts"], event["ts"] + event["dur"], about.get("bytes", 0))
        on_main.append((event["tid"], found))
        if event["name"] == "all_reduce" and found.nbytes:
            reduced.append(found)
    reduced.sort()
    waits = [found for track, found in on_main if track in main]
    period = period_of([one.nbytes for one in reduced])
    repeated = [one.nbytes for one in reduced[-period:]]
    plans = []
    # Backwards, because the first steps may differ: buckets are laid out anew.
    for first in range(len(reduced) - period, 0, -period):
        own, begin = reduced[first : first + period], reduced[first - 1].end_us
        if [one.nbytes for one in own] != repeated:
            break
        plans.append(_step(own, begin, waits))
    plans.sort(key=lambda one: one.compute_s)
    return plans[len(plans) // 2]


def period_of(sizes: Sequence[int]) -> int:
    """Return the shortest period with which a list ends at least three times.

    Raises:
        ValueError: There is none.
    """
    for period in range(1, len(sizes) // _LEAST_PERIODS + 1):
        tail = sizes[-_LEAST_PERIODS * period :]
        if list(tail) == list(tail[:period]) * _LEAST_PERIODS:
            return period
    raise ValueError(
        f"a timeline of at least {_LEAST_PERIODS} equal steps is needed; got {len(sizes)} "
        "all-reduces that do not repeat"
    )


def _step(own: Sequence[_Slice], begin_us: float, waits: Iterable[_Slice]) -> StepPlan:
    end_us = max(one.end_us for one in own)
    waited = _covered_us(
        (max(one.begin_us, begin_us), min(one.end_us, end_us))
        for one in waits
        if one.end_us > begin_us and one.begin_us < end_us
    )
    compute_us = max(end_us - begin_us - waited, 0.0)
    ready = [min(max(one.begin_us - begin_us, 0.0), compute_us) / 1e6 for one in own]
    return StepPlan(
        compute_us / 1e6, tuple(ready), (0.0,) * len(own), tuple((one.nbytes,) for one in own)
    )


def _covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    covered, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(end - max(begin, last), 0.0)
        last = max(last, end)
    return covered
