"""Bytes of optimizer state on the fullest rank, computed for partitions of known networks.

Adam and AdamW keep two fp32 values per element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from harness import tables
from mpidist.zero.shards import buffer_plan, partition
from training import gradient_lists

_WORLDS = (1, 2, 3, 4, 8, 64)
_NETWORKS = {"ResNet-50": gradient_lists.resnet50, "GPT-2 XL": gradient_lists.gpt2_xl}
_BYTES = 8  # exp_avg and exp_avg_sq


def most_elements(sizes: Sequence[int], ranks: int, name: str) -> int:
    """Return the number of elements on the rank with the most."""
    if name == partition.FLAT:
        total = sum(map(buffer_plan.padded, sizes))
        bounds = partition.cuts(total, ranks, buffer_plan.UNIT)
        return max(end - first for first, end in itertools.pairwise(bounds))
    owners, _ = (
        partition.greedy(sizes, [0] * ranks)
        if name == partition.GREEDY
        else partition.balanced(sizes, [0.0] * ranks)
    )
    return max(
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    )


def rows() -> list[dict[str, Any]]:
    """Return the bytes and their share of the total, by network, world size and partition."""
    found = []
    for network, shapes in _NETWORKS.items():
        sizes = [math.prod(shape) for shape in shapes()]
        whole = _BYTES * sum(sizes)
        for ranks in _WORLDS:
            for name in partition.PARTITIONS:
                most = _BYTES * most_elements(sizes, ranks, name)
                found.append(
                    {
                        "network": network,
                        "ranks": ranks,
                        "partition": name,
                        "bytes": most,
                        "share": most / whole,
                        "over_even": most / whole * ranks,
                        "biggest_parameter": _BYTES * max(sizes),
                    }
                )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the table: bytes of the fullest rank, and their ratio to an even share."""
    lines = []
    for network, ranks in dict.fromkeys((row["network"], row["ranks"]) for row in found):
        by_name = {
            row["partition"]: row
            for row in found
            if (row["network"], row["ranks"]) == (network, ranks)
        }
        cells = [
            f"{row['bytes'] / 2**20:,.1f} ({row['over_even']:.3f})" for row in by_name.values()
        ]
        lines.append(
            (network, ranks, *cells, f"{by_name['flat']['biggest_parameter'] / 2**20:,.1f}")
        )
    headers = (
        "network",
        "ranks",
        *(f"{name}, MiB" for name in partition.PARTITIONS),
        "biggest parameter, MiB",
    )
    return tables.text(lines, headers)
