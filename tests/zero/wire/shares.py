"""Masters and flat buffers that ranks share by a wire."""

from __future__ import annotations

from itertools import pairwise

import torch

HALF = [torch.bfloat16, torch.float16]
WIDE = [torch.float32, torch.float64]


def layouts(size):
    """Return bounds: even, ragged (after 64 unowned elements) and empty shards, no elements."""
    ragged = [64, *(64 + 320 * rank * rank for rank in range(1, size + 1))]
    return [
        [rank * 2048 for rank in range(size + 1)],
        ragged,
        [0] * size + [1024],
        [0, *[64] * size],
        [128] * (size + 1),
    ]


def buffers(group, bounds, dtype, turn=0):
    """Return all ranks' masters, this rank's master, and the flat buffer."""
    torch.manual_seed(turn)
    flat = torch.randn(bounds[-1] + 100).to(dtype)
    masters = [
        flat[start:stop] + torch.randn(stop - start).to(dtype) * 0.01
        for start, stop in pairwise(bounds)
    ]
    return masters, masters[group.rank].clone(), flat


def is_equal_everywhere(group, flat):
    everyones = group.all_gather_object(flat.cpu().view(torch.uint8).numpy().tobytes())
    return all(one == everyones[0] for one in everyones)
