"""Half-precision wires: all ranks see the rounded masters."""

from __future__ import annotations

import pytest
import torch

from mpidist.zero.wire.half import HalfWire
from tests.tools.support import agree
from tests.zero.wire import shares
from tests.zero.wire.shares import HALF, WIDE


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_halves_are_the_rounded_masters_on_all_ranks(group, device, dtype):
    wire = HalfWire(dtype)
    for flat_dtype in (*WIDE, dtype):
        for turn, bounds in enumerate(shares.layouts(group.size)):
            masters, own, flat = shares.buffers(group, bounds, flat_dtype, turn)
            wanted, before = flat.clone(), own.clone()
            wanted[bounds[0] : bounds[-1]] = (
                torch.cat(masters)
                if group.size == 1
                else torch.cat(masters).to(dtype).to(flat_dtype)
            )
            wire.share(group, own, flat, bounds)
            agree(
                group,
                torch.equal(flat, wanted) and torch.equal(own, before),
                f"{flat_dtype} at {bounds}",
            )
    # Without rounding the master may be the shard itself.
    masters, own, flat = shares.buffers(group, bounds := shares.layouts(group.size)[1], dtype)
    shard = flat[bounds[group.rank] : bounds[group.rank + 1]].copy_(own)
    wire.share(group, shard, flat, bounds)
    agree(group, torch.equal(flat[bounds[0] : bounds[-1]], torch.cat(masters)))
