"""Performance goals of the collectives, and the verdict of a run.

A missed goal fails nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_KI, _MI = 1 << 10, 1 << 20
# Operations that must beat Gloo at every size.
_AHEAD = ("all_gather_into_tensor", "all_gather", "broadcast", "reduce_scatter_tensor", "barrier")


@dataclass(frozen=True)
class Goal:
    """Bound on one contender relative to another, over a range of sizes."""

    text: str
    operation: str
    left: str
    right: str
    # Field of Comparison.
    figure: str
    bound: float
    # Whether the bound is a lower bound.
    at_least: bool
    # Whether a size in bytes is in range.
    covers: Callable[[int], bool]

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def _faster(size: int, factor: float) -> Goal:
    text = f"dist.all_reduce fp32, {format_bytes(size)}: Gloo's time over ours ≥ {factor:g}"
    return Goal(
        text, "all_reduce", "gloo", "mpidist", "ratio_of_rounds", factor, True, lambda s: s == size
    )


def _near(ours: str, call: str, start: int) -> Goal:
    text = f"{call} fp32 from {format_bytes(start)}: our time over mpi4py's ≤ 1.1"
    return Goal(
        text, "all_reduce", ours, "mpi4py", "ratio_of_rounds", 1.1, False, lambda s: s >= start
    )


def _above(ours: str, call: str, limit_us: float) -> Goal:
    text = f"{call} fp32, 8 B: our time less mpi4py's ≤ {limit_us:g} us"
    return Goal(
        text,
        "all_reduce",
        ours,
        "mpi4py",
        "difference_of_rounds_us",
        limit_us,
        False,
        lambda s: s == 8,
    )


def format_bytes(size: int) -> str:
    for unit, name in ((_MI, "MiB"), (_KI, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


_BF16 = ("all_reduce_bf16", "mpidist", "mpidist fp32")
GOALS = (
    _faster(8, 40),
    _faster(64 * _KI, 12),
    _faster(16 * _MI, 3),
    _near("mpidist", "dist.all_reduce", 256 * _KI),
    _near("native", "our native all_reduce", 64 * _KI),
    _above("mpidist", "dist.all_reduce", 3.5),
    _above("native", "our native all_reduce", 1.5),
    Goal(
        "dist.all_reduce bf16 from 64 Ki elements: time over fp32's of as many ≤ 1.2",
        *(*_BF16, "ratio_of_rounds", 1.2, False, lambda s: s >= 256 * _KI),
    ),
    Goal(
        "dist.all_reduce bf16 below 64 Ki elements: time less fp32's of as many ≤ 5 us",
        *(*_BF16, "difference_of_rounds_us", 5.0, False, lambda s: s < 256 * _KI),
    ),
    *(
        Goal(
            f"{name}: ahead of Gloo at every size",
            name,
            "gloo",
            "mpidist",
            "ratio_of_rounds",
            1.0,
            True,
            lambda s: True,
        )
        for name in _AHEAD
    ),
)


def judge(results: Sequence[dict[str, Any]], goals: Sequence[Goal] = GOALS) -> list[dict[str, Any]]:
    """Compare the results of a run, as in its JSON, with each goal; the worst size decides."""
    return [_judge(goal, results) for goal in goals]


def _judge(goal: Goal, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    measured = [
        (comparison[goal.figure], result["size_bytes"])
        for result in results
        if result["operation"] == goal.operation and goal.covers(result["size_bytes"])
        for comparison in result["comparisons"]
        if (comparison["left"], comparison["right"]) == (goal.left, goal.right)
    ]
    if not measured:
        return {
            "goal": goal.text,
            "verdict": "not measured",
            "worst": None,
            "worst_size_bytes": None,
            "missed_sizes_bytes": [],
        }
    worst, size = min(measured) if goal.at_least else max(measured)
    missed = [size for value, size in measured if not goal.holds(value)]
    verdict = "not reached" if missed else "reached"
    return {
        "goal": goal.text,
        "verdict": verdict,
        "worst": worst,
        "worst_size_bytes": size,
        "missed_sizes_bytes": missed,
    }


def judge_cases(
    goal: str, values: Sequence[tuple[str, float]], bound: float, at_least: bool = False
) -> dict[str, Any]:
    """Compare figures of named cases with one bound; the worst decides, and is missed first."""
    worst_first = sorted(values, key=lambda pair: pair[1], reverse=not at_least)
    missed = [name for name, value in worst_first if (value < bound if at_least else value > bound)]
    verdict = "not measured" if not values else "not reached" if missed else "reached"
    name, worst = worst_first[0] if values else ("", None)
    return {
        "goal": goal, "verdict": verdict, "worst": worst, "worst_case": name, "missed": missed,
    }  # fmt: skip


def judge_below(text: str, value: float | None, bound: float) -> dict[str, Any]:
    """Compare one figure with an upper bound; None if it was not measured."""
    verdict = "not measured" if value is None else "reached" if value < bound else "not reached"
    return {
        "goal": text,
        "verdict": verdict,
        "worst": value,
        "worst_size_bytes": None,
        "missed_sizes_bytes": [],
    }
