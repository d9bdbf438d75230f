"""Quantizing hooks against a naive twin, and against torch's hooks on torch's DDP."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

from mpidist.ddp.hooks import quantization
from mpidist.ddp.hooks.quantization import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    share_bounds,
)
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree, raises_on_all


def test_shares_cover_all_elements_in_whole_blocks():
    for numel, block, ranks in [
        (1, 1, 3),
        (10, 10, 3),
        (10, 4, 3),
        (7, 2, 2),
        (100, 7, 6),
        (3, 3, 8),
    ]:
        bounds = share_bounds(numel, block, ranks)
        assert [element for start, stop in bounds for element in range(start, stop)] == list(
            range(numel)
        )
        assert block == numel or all(start % block == 0 for start, stop in bounds if start < stop)
        assert bounds[0][1] == max(stop - start for start, stop in bounds)


def twin(parts, block):
    """Return the average of the dequantized tensors, block by block."""
    total = torch.zeros_like(parts[0], dtype=torch.float64)
    for part in parts:
        for start in range(0, len(part), block):
            x = part[start : start + block].double()
            low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
            scale = (high - low) / 255 or 1.0
            zero = -round(low / scale)
            total[start : start + block] += scale * (
                ((x / scale).round() + zero).clamp(0, 255) - zero
            )
    return total / len(parts)


HOOKS = {
    "per tensor": (quantization_pertensor_hook, 10**9),
    "per channel": (quantization_perchannel_hook, 512),
    "channels of 16": (functools.partial(quantization_perchannel_hook, bucket_size=16), 16),
}


def gradients(rank):
    return torch.randn(700, generator=torch.Generator().manual_seed(rank)) * torch.logspace(
        -3, 0, 700
    )


def as_real(tensor):
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


class Dot(torch.nn.Module):
    """A module whose gradient is its input."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(700, dtype=dtype))

    def forward(self, values):
        product = (self.weight * values).sum()
        return product.real if product.is_complex() else product


@pytest.mark.mpi
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("most_to_all", [1, 5], ids=["by shares", "to all"])
@pytest.mark.parametrize("name", HOOKS)
def test_the_average_is_that_of_the_quantized_gradients(group, name, most_to_all, monkeypatch):
    monkeypatch.setattr(quantization, "MOST_TO_ALL", most_to_all)
    hook, block = HOOKS[name]
    for between_nodes in (False, True):
        monkeypatch.setattr(type(group), "is_single_node", not between_nodes)
        for dtype in (torch.float32, torch.float64, torch.complex64):
            ddp = DistributedDataParallel(Dot(dtype), process_group=group)
            ddp.register_comm_hook(group, hook)
            ddp(gradients(group.rank).to(dtype)).backward()
            expected = twin(
                [as_real(gradients(rank).to(dtype)) for rank in range(group.size)], block
            )
            near = torch.isclose(
                as_real(ddp.module.weight.grad).double(), expected, rtol=1e-5, atol=1e-7
            )
            # A value halfway between two steps may round either way in another precision.
            agree(group, near.float().mean() > 0.99, f"{dtype}: {int((~near).sum())} differ")


@pytest.mark.mpi
@pytest.mark.usefixtures("device")
def test_both_ways_give_the_same_bits_on_all_ranks(group, monkeypatch):
    found = []
    for most, block in [(1, 700), (8, 700), (1, 16), (8, 16)]:
        monkeypatch.setattr(quantization, "MOST_TO_ALL", most)
        flat = gradients(group.rank)
        quantization.average_quantized(group, flat, block)
        rows = flat.new_empty(group.size, flat.numel())
        group.all_gather_into_tensor(rows, flat)
        agree(group, bool((rows == rows[0]).all()), "ranks differ")
        found.append(flat)
    agree(
        group,
        torch.equal(found[0], found[1])
        and torch.equal(found[2], found[3])
        and not torch.equal(found[0], found[2]),
    )
    raises_on_all(
        group,
        ValueError,
        lambda: quantization_perchannel_hook(group, None, 0),
        "bucket_size must be at least 1",
    )
    raises_on_all(
        group, TypeError, lambda: quantization_pertensor_hook(3, None), "needs a group of mpidist"
    )
    flat = gradients(group.rank)
    flat[3] = float("inf") if group.rank == group.size - 1 else 0.0
    quantization.average_quantized(group, flat, 350)
    agree(
        group,
        bool(flat[:350].isnan().all() and flat[350:].isfinite().all()),
        "an overflow reaches all ranks",
    )


def trained(ddp, rank):
    for step in range(2):
        ddp.zero_grad()
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in ddp.module.parameters()])


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
def test_the_hook_averages_as_torchs_hook_on_torchs_module(group):
    """torch's per-channel hook fails without NCCL; test_uint8_blocks compares its arithmetic."""

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    reference = torch.nn.parallel.DistributedDataParallel(net())
    reference.register_comm_hook(dist.group.WORLD, theirs.quantization_pertensor_hook)
    expected = trained(reference, group.rank)
    plain = trained(DistributedDataParallel(net(), process_group=group), group.rank)
    # torch's own hook runs on our bucket, too.
    for hook in (quantization_pertensor_hook, theirs.quantization_pertensor_hook):
        ours = DistributedDataParallel(net())
        ours.register_comm_hook(dist.group.WORLD, hook)
        got = trained(ours, group.rank)
        agree(
            group,
            torch.allclose(got, expected, atol=1e-5),
            f"{float((got - expected).abs().max())}",
        )
        agree(group, not torch.allclose(got, plain, atol=1e-6), "quantization leaves its mark")
