"""Plan of a run of ``make gpu``: the order of its steps, and those left out for lack of time.

Pure. Steps that have never run come first, then those that failed when they last ran, then those
that passed, the longest ago first; equals stand in the default order. Benchmarks reserve their time
before the others are admitted. Admission is by this order across all phases; execution is phase by
phase, because benchmarks must be alone on the machine.
"""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

TESTS, BENCHMARKS, SANITIZERS = PHASES = ("tests", "benchmarks", "sanitizers")
OK, FAILED, TIMED_OUT, CUT_SHORT, NEVER = "ok", "FAILED", "TIMED OUT", "CUT SHORT", ""

UNKNOWN_S = 20.0  # expected of a step of which no time is known
# Two jobs beside each other, or another machine, take longer than the last time says.
MARGIN = 1.2
MOST_OF_BENCHMARKS = 1 / 3  # share of the budget that they may reserve


class Planned(Protocol):
    """A step as the plan sees it."""

    @property
    def name(self) -> str: ...

    @property
    def phase(self) -> str: ...


_Step = TypeVar("_Step", bound=Planned)


@dataclass(frozen=True)
class Past:
    """Last run of a step."""

    outcome: str = NEVER  # NEVER: ``seconds`` are an estimate, or of a run that did not count
    seconds: float = UNKNOWN_S
    call: int = 0  # number of the call of ``make gpu`` in which it ran

    @property
    def expected_s(self) -> float:
        return MARGIN * self.seconds


@dataclass(frozen=True)
class Plan(Generic[_Step]):
    """Steps of each phase in the order of execution, their times, and the rest.

    Attributes:
        chosen: Key: phase, in the order of execution.
        seconds: Expected length of each phase.
        left_out: In the order in which they would have come.
    """

    chosen: Mapping[str, tuple[_Step, ...]]
    seconds: Mapping[str, float]
    left_out: tuple[_Step, ...]


def priority(name: str, past: Mapping[str, Past], order: Sequence[str]) -> tuple[int, int, int]:
    """Return the key by which steps are sorted.

    Args:
        name: Of the step.
        past: Last runs by name.
        order: Patterns of names; the first that matches gives the place.
    """
    last = past.get(name, Past())
    kind = {NEVER: 0, OK: 2}.get(last.outcome, 1)
    place = next(
        (index for index, pattern in enumerate(order) if fnmatch.fnmatchcase(name, pattern)),
        len(order),
    )
    return kind, last.call, place


def length_s(seconds: Sequence[float], lanes: int) -> float:
    """Return the time of steps begun in this order, each as soon as one of the lanes is free."""
    ends = [0.0] * lanes
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def lanes_of(phase: str, lanes: int) -> int:
    """Return the number of steps of a phase that may run beside each other."""
    return 1 if phase == BENCHMARKS else lanes


def plan(
    steps: Sequence[_Step],
    past: Mapping[str, Past],
    order: Sequence[str],
    budget_s: float,
    lanes: int,
) -> Plan[_Step]:
    """Choose the steps that fit a budget.

    Args:
        steps: In any order; those that cannot run are not among them.
        past: Last runs by name.
        order: Patterns of names, the default order.
        budget_s: Time for all phases.
        lanes: Number of steps that may run beside each other, but for benchmarks.
    """
    ranked = sorted(steps, key=lambda step: priority(step.name, past, order))
    place = {step.name: index for index, step in enumerate(ranked)}
    chosen: dict[str, list[_Step]] = {phase: [] for phase in PHASES}
    seconds = dict.fromkeys(PHASES, 0.0)

    def admit(step: _Step, limit_s: float) -> bool:
        names = [*(one.name for one in chosen[step.phase]), step.name]
        own_s = length_s(
            [past.get(name, Past()).expected_s for name in sorted(names, key=place.__getitem__)],
            lanes_of(step.phase, lanes),
        )
        if sum(seconds.values()) - seconds[step.phase] + own_s > limit_s:
            return False
        chosen[step.phase].append(step)
        chosen[step.phase].sort(key=lambda one: place[one.name])
        seconds[step.phase] = own_s
        return True

    reserved = {
        step.name
        for step in ranked
        if step.phase == BENCHMARKS and admit(step, MOST_OF_BENCHMARKS * budget_s)
    }
    left_out = tuple(
        step for step in ranked if step.name not in reserved and not admit(step, budget_s)
    )
    return Plan({phase: tuple(steps) for phase, steps in chosen.items()}, seconds, left_out)


def following(pending: Sequence[_Step], past: Mapping[str, Past], left_s: float) -> _Step | None:
    """Return the first step that is expected to end within the time left."""
    return next(
        (step for step in pending if past.get(step.name, Past()).expected_s <= left_s), None
    )
