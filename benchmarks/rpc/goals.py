"""Bounds on the calls of mpidist.rpc, and whether a run's results keep them.

Nothing fails on a bound that a run misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.goals import Goal, format_bytes, judge, judge_below
from rpc import cases as rpc_cases
from rpc import workers as rpc_workers
from rpc.cases import Case

_KI, _MI = 1 << 10, 1 << 20
FLOOR, PING_PONG, NOOP, FEWER = "floor", "ping-pong", "mpidist no-op", "mpidist, fewer"
_BUSY_MEDIAN_MS, _BUSY_P99_MS, _IDLE_SHARE = 0.5, 3.0, 0.02


def verdicts_of(
    results: Sequence[dict[str, Any]],
    cases: Sequence[Case],
    busy: dict[str, float] | None,
    idle: float | None,
) -> list[dict[str, Any]]:
    """Return whether each bound holds.

    Args:
        results: Entries of the JSON, one per case.
        cases: The cases that ran.
        busy: Times of calls to a worker that computes in Python; None if not measured.
        idle: Share of a core that an idle worker uses; None if not measured.
    """
    return [
        *judge(results, [*GOALS, *map(_data_only, cases)]),
        judge_below(
            f"callee that computes: median < {_BUSY_MEDIAN_MS:g} ms",
            busy and busy["median_ms"],
            _BUSY_MEDIAN_MS,
        ),
        judge_below(
            f"callee that computes: p99 < {_BUSY_P99_MS:g} ms",
            busy and busy["p99_ms"],
            _BUSY_P99_MS,
        ),
        judge_below(f"idle worker: < {_IDLE_SHARE:g} of a core", idle, _IDLE_SHARE),
    ]


def _ratio(
    text: str, case: tuple[str, int], left: str, right: str, bound: float, at_least: bool = False
) -> Goal:
    """Return the bound on ``left`` over ``right`` in the case of one operation and size."""
    operation, size = case
    return Goal(
        text, operation, left, right, "ratio_of_medians", bound, at_least, lambda s: s == size
    )


def _within(operation: str, size: int, right: str, factor: float) -> Goal:
    """Return the bound on one of mpidist's calls over a cheaper call or message."""
    over = {FLOOR: "the floor", PING_PONG: "mpi4py's ping-pong", NOOP: "our no-op"}[right]
    text = f"{_named(operation, size)}: our time over {over} ≤ {factor:g}"
    return _ratio(text, (operation, size), "mpidist", right, factor)


def _linear(count: int, factor: float) -> Goal:
    """Return the bound on the time per tensor of a message with many tensors."""
    text = f"tensor of {count} in one message: our time over one of {count // 10} ≤ {factor:g}"
    case = "tensor of many", count * rpc_cases.SMALL_BYTES
    return _ratio(text, case, "mpidist", FEWER, factor)


def _data_only(case: Case) -> Goal:
    """Return the bound on a call between data-only workers over one between other workers."""
    operation, size = case.operation, case.size_bytes
    text = f"{_named(operation, size)}: data only over what may be pickles ≤ 1.3"
    return _ratio(text, (operation, size), rpc_workers.DATA_ONLY, "mpidist", 1.3)


def _faster(operation: str, size: int, factor: float) -> Goal:
    """Return the bound on TensorPipe's time over mpidist's."""
    text = f"{_named(operation, size)}: TensorPipe's time over ours, expected ≥ {factor:g}"
    return _ratio(text, (operation, size), "tensorpipe", "mpidist", factor, at_least=True)


def _named(operation: str, size: int) -> str:
    return f"{operation}, {format_bytes(size)}" if size else operation


GOALS = (
    _within("no-op", 0, FLOOR, 1.5),
    _within("echo", _KI, FLOOR, 2.5),
    _within("async", 0, FLOOR, 1.8),
    _within("remote + to_here", 0, FLOOR, 3),
    _within("remote + to_here", _KI, FLOOR, 5),
    _within("remote of torch.add + to_here", _KI, FLOOR, 5),
    _within("RRef and tensor", 4 * _KI, NOOP, 2.5),
    _within("echo", 4 * _MI, PING_PONG, 1.2),
    # The time grows linearly; the margin is for changes in the machine's speed.
    _linear(1000, 1.2),
    _faster("no-op", 0, 12),
    _faster("echo", _KI, 12),
    _faster("echo", 4 * _MI, 1.5),
    _faster("async", 0, 5),
    _faster("remote + to_here", 0, 8),
)
