"""Comparison of the ranks' replicas of a model by one 64-bit sum (pure).

Ranks that average gradients hold the same parameters, bit by bit. A rank whose memory or cores are
at fault does not, long before its losses show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from mpidist.comm.mpi import rank_ranges
from mpidist.errors import ReplicaError

_WORD_BYTES = 8


def checksum(parameters: Sequence[torch.Tensor]) -> int:
    """Return a 64-bit sum of replicated parameters, equal wherever all their bits are.

    A parameter counts by its place, so that two in each other's place are found.

    Blocks: until parameters on a device are computed.
    """
    sums = [_sum(parameter.detach()) for parameter in parameters]
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for place, one in enumerate(sums):
        by_device.setdefault(one.device, []).append((2 * place + 1, one))
    return sum(
        weight * value
        for rows in by_device.values()
        for (weight, _), value in zip(
            rows, torch.stack([one for _, one in rows]).tolist(), strict=True
        )
    ) % (1 << 64)


def require_same(where: str, sums: Sequence[int], world_ranks: Sequence[int]) -> None:
    """Refuse replicas of which some differ; the same on all ranks.

    Args:
        where: The beginning of the message.
        sums: ``checksum`` of each rank.
        world_ranks: Of these ranks.

    Raises:
        ReplicaError: Names the ranks outside the majority; all, where no sum has one.
    """
    ((common, count), *others) = Counter(sums).most_common()
    if not others:
        return
    if 2 * count > len(sums):
        odd = [rank for rank, one in enumerate(sums) if one != common]
        text = (
            f"the parameters of {rank_ranges.named(odd)} differ from those that the other "
            f"{count} ranks share"
        )
    else:
        odd = list(range(len(sums)))
        rows = "; ".join(f"rank {rank}: {one:016x}" for rank, one in enumerate(sums))
        text = f"the parameters of the ranks differ, and no majority shares a sum. {rows}"
    raise ReplicaError(
        f"{where}: {text}: memory or a core of a rank was at fault, or a rank has changed "
        "parameters by itself; the commit before stays",
        [world_ranks[rank] for rank in odd],
    )


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes in 64-bit words, in the order of its elements."""
    octets = values.reshape(-1).view(torch.uint8)
    end = octets.numel() - octets.numel() % _WORD_BYTES
    words = octets[:end]
    if words.storage_offset() % _WORD_BYTES:
        words = words.clone()
    return words.view(torch.int64).sum() + octets[end:].sum()
