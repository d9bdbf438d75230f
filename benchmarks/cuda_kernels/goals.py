"""Performance goals of the kernels, and the verdict of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda_kernels import cases as copies
from cuda_kernels import powersgd_cases as powersgd
from harness import tables
from harness.goals import format_bytes, judge_cases

# Kernels, the least share of the device copy's rate, and the bytes from which it is asked.
_COPIES, _OF_COPY, _LEAST_BYTES = ("pack", "unpack"), 0.85, 16 << 20


def judge(
    copied: Sequence[dict[str, Any]], compressed: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Compare a run with its goals; a missed goal fails nothing."""
    goal = (
        f"{', '.join(_COPIES)} ≥ {_OF_COPY:.2f} of the device copy's rate, from "
        f"{format_bytes(_LEAST_BYTES)}"
    )
    verdicts = [judge_cases(goal, _shares(copied), _OF_COPY, True)]
    for name in (powersgd.OURS, powersgd.KERNELS):
        factors = [
            (_bucket_case(result), result["contenders"][name]["torchs_over_it"])
            for result in compressed
            if result["rank"] == 4 and result["tensors_of"] in ("ResNet-50", "GPT-2")
        ]
        goal = f"PowerSGD, rank 4: time of torch's hook over {name} ≥ 3"
        verdicts.append(judge_cases(goal, factors, 3, at_least=True))
    counts = [
        (_bucket_case(result), float(max(result["launches_per_bucket"].values())))
        for result in compressed
        if None not in result["launches_per_bucket"].values()
    ]
    verdicts.append(judge_cases("PowerSGD: launches of our kernels a bucket ≤ 6", counts, 6))
    return verdicts


def _shares(copied: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Return the shares of the device copy's rate that kernels reach, each with its case."""
    return [
        (_copy_case(result), result["contenders"][copies.OURS]["over_copy"])
        for result in copied
        if result["operation"] in _COPIES and result["size_bytes"] >= _LEAST_BYTES
    ]


def _copy_case(result: dict[str, Any]) -> str:
    return (
        f"{result['operation']}, {result['tensors_of']}, {result['dtypes']}, "
        f"{format_bytes(result['size_bytes'])}"
    )


def _bucket_case(result: dict[str, Any]) -> str:
    return f"{result['tensors_of']}, rank {result['rank']}"


def goals_table(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the table of the goals."""
    rows = [
        (
            one["goal"],
            "" if one["worst"] is None else f"{one['worst']:.2f} ({one['worst_case']})",
            one["verdict"],
        )
        for one in verdicts
    ]
    return tables.text(rows, ("to reach", "worst", "verdict"))
