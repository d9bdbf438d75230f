"""Data-parallel modules on CUDA devices: no step makes the host wait for the device."""

from __future__ import annotations

import pytest
import torch

from mpidist.ddp import DistributedDataParallel
from mpidist.ddp.hooks.default import allreduce_hook, bf16_compress_hook
from tests.tools.support import agree, busy, without_host_waits

pytestmark = pytest.mark.mpi(min_size=2)


def net(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 130), torch.nn.GELU(), torch.nn.Linear(130, 71)
    ).to(device)


def batch(rank: int, step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(16, 33, generator=generator).to(device)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize("hook", [allreduce_hook, bf16_compress_hook])
def test_a_step_makes_the_host_wait_nowhere(group, target, hook, options):
    model = net(target)
    # Several buckets, so that some are averaged while the backward pass goes on.
    module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, **options)
    module.register_comm_hook(group, hook)
    steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [batch(group.rank, step, target) for step in range(5)]

    def step(x):
        steps.zero_grad()
        busy(target)
        module(x).square().mean().backward()
        steps.step()

    # The first steps make buckets and streams, and order the buckets anew.
    for x in batches[:2]:
        step(x)
    group.barrier()
    with without_host_waits(target):
        for x in batches[2:]:
            step(x)
    plain = net(target)
    steps = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number in range(len(batches)):
        steps.zero_grad()
        whole = torch.cat([batch(rank, number, target) for rank in range(group.size)])
        plain(whole).square().mean().backward()
        steps.step()
    tolerance = 1e-5 if hook is allreduce_hook else 1e-3
    close = all(
        torch.allclose(a, b, atol=tolerance)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    agree(group, close)
