"""All-reduce of low-precision types in host memory: sums in fp32, rounded once."""

import pytest
import torch

from mpidist.comm.algorithms import low_precision
from mpidist.comm.algorithms.reduce_op import (
    ACCUMULATES_IN,
    AVG,
    PremulSum,
)
from tests.comm.algorithms.test_reductions import part
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [d for d in ACCUMULATES_IN if d is not torch.complex32], ids=str)
@pytest.mark.parametrize("numel", [3, 5_000, 100_003, 700_001])
def test_narrow_types_accumulate_in_fp32_with_the_same_bits_everywhere(group, dtype, numel):
    def mine(rank):
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)

    parts = [mine(r) for r in range(group.size)]
    total = torch.zeros(numel)
    for other in parts:
        total += other.float()
    tensor = mine(group.rank)
    group.all_reduce(tensor)
    bits = tensor.view(torch.uint8).numpy().tobytes()
    everywhere = group.all_gather_object(hash(bits) if group.size == 1 else bits)
    if group.size <= 2 or numel > low_precision.WIDEN_NUMEL:
        ok = torch.equal(tensor, total.to(dtype))  # in rank order and rounded once
    else:
        # MPI adds the widened numbers in another order: an ulp of fp32 may change the rounding.
        ok = bool(
            (
                (tensor.float() - total).abs() <= total.abs() * torch.finfo(dtype).eps * 2 + 1e-6
            ).all()
        )
    agree(group, ok)
    assert len(set(everywhere)) == 1


def test_a_mean_of_large_halves_does_not_overflow(group):
    for numel in (4, 200_000):
        tensor = torch.full((numel,), 60_000.0, dtype=torch.float16)
        group.all_reduce(tensor, AVG)
        agree(group, bool((tensor == 60_000).all()), f"{numel}: {tensor[:3]}")


def test_half_types_are_summed_in_fp32(group):
    # 2048 + 1 is 2048 in fp16; in fp32 the ones are not lost.
    tensor = torch.full((100_000,), 2048.0 if group.rank == 0 else 1.0, dtype=torch.float16)
    group.all_reduce(tensor)
    expected = torch.tensor(2048.0 + (group.size - 1)).half()
    agree(group, bool((tensor == expected).all()), f"{tensor[:3]} != {expected}")


def test_premul_sum_of_narrow_types_rounds_once(group):
    """Products are not rounded before the sum, in all_reduce, reduce and reduce_scatter."""
    factor = 1 / 3
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        parts = [
            part(r, (600 * group.size,), torch.float32).div(7).to(dtype) for r in range(group.size)
        ]
        total = sum(p.double() * factor for p in parts)
        mine = parts[group.rank]
        tensor, kept, scattered = mine.clone(), mine.clone(), torch.zeros(600).to(dtype)
        group.all_reduce(tensor, PremulSum(factor))
        group.reduce(kept, 0, PremulSum(factor))
        group.reduce_scatter_tensor(scattered, mine, PremulSum(factor))
        listed = torch.zeros(600).to(dtype)
        group.reduce_scatter(listed, list(mine.split(600)), PremulSum(factor))
        own = slice(600 * group.rank, 600 * (group.rank + 1))

        def is_rounded_once(got, exact, dtype=dtype):
            # MPI adds the fp32 products in another order, and terms may cancel.
            limit = (
                exact.abs() * torch.finfo(dtype).eps * 0.501
                + torch.finfo(dtype).smallest_normal
                + 1e-6
            )
            return bool(((got.double() - exact).abs() <= limit).all())

        ok = (
            is_rounded_once(tensor, total)
            and is_rounded_once(scattered, total[own])
            and is_rounded_once(listed, total[own])
        )
        ok &= (
            is_rounded_once(kept, total)
            if group.rank == 0
            else torch.equal(kept.float(), mine.float())
        )
        agree(group, ok, f"{dtype}")
