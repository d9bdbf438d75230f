"""Bandwidths and message rates, from the times of calls.

Source: the performance page of nccl-tests for bus bandwidth; the OSU micro-benchmarks' osu_bw,
osu_bibw and osu_mbw_mr for messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness import tables
from harness.goals import format_bytes


def bus_bytes(operation: str, size_bytes: int, ranks: int) -> float | None:
    """Return the bytes that each rank's link has to carry for a call, or None without such a bound.

    The least that any algorithm sends or receives on the busiest link, so that the bandwidth of a
    call that reaches the link's own is the link's, whatever the number of ranks.

    Args:
        operation: Its name in ``collectives.cases.OPERATIONS``.
        size_bytes: One contribution, as there: a rank's input of an all-gather, a rank's output of
            a reduce-scatter, a rank's message to each peer of an all-to-all.
        ranks: Of the group.
    """
    per_contribution = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "broadcast": 1,
        "reduce": 1,
        "all_gather_into_tensor": ranks - 1,
        "all_gather": ranks - 1,
        "reduce_scatter_tensor": ranks - 1,
        "all_to_all_single": ranks - 1,
        "ping_pong": 1,
    }
    factor = per_contribution.get(operation)
    return None if factor is None or ranks < 2 else factor * size_bytes


def bus_gbps(result: dict[str, Any], ranks: int) -> dict[str, float]:
    """Return the bus bandwidth of each contender's median in GB/s; empty without a bound."""
    carried = bus_bytes(result["operation"], result["size_bytes"], ranks)
    if not carried:
        return {}
    return {
        name: carried / contender["median_us"] / 1000
        for name, contender in result["contenders"].items()
    }


def message_rates(result: dict[str, Any], ranks: int) -> dict[str, tuple[float, float]]:
    """Return the thousand messages and the GB a second of each contender's median, of all pairs.

    A time is that of one message between two ranks, in one direction or in each of both; all pairs
    of ranks exchange at once.
    """
    directions = 2 if result["operation"].endswith("both ways") else 1
    at_once = ranks // 2 * directions
    return {
        name: (
            at_once / contender["median_us"] * 1000,
            at_once * result["size_bytes"] / contender["median_us"] / 1000,
        )
        for name, contender in result["contenders"].items()
    }


def bus_table(results: Sequence[dict[str, Any]], ranks: int) -> str:
    """Return the table of one operation's bus bandwidths; "" where no bound is known."""
    found = [(result, bus_gbps(result, ranks)) for result in results]
    return _table([(result, values) for result, values in found if values], "GB/s", "{:.3g}".format)


def rate_table(results: Sequence[dict[str, Any]], ranks: int) -> str:
    """Return the table of one case's message rates and bandwidths, of all pairs together."""
    found = [(result, message_rates(result, ranks)) for result in results]
    return _table(found, "k/s, GB/s", lambda rates: f"{rates[0]:.3g}, {rates[1]:.3g}")


def _table(
    found: Sequence[tuple[dict[str, Any], dict[str, Any]]], unit: str, told: Callable[[Any], str]
) -> str:
    if not found:
        return ""
    labels = list(dict.fromkeys(label for _, values in found for label in values))
    rows = [
        [
            format_bytes(result["size_bytes"]),
            *(told(values[label]) if label in values else "" for label in labels),
        ]
        for result, values in found
    ]
    return tables.text(rows, ["size", *(f"{label}\n{unit}" for label in labels)])
