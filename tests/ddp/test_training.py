"""k ranks × batch b are one rank × batch k·b for ten steps of any optimizer.

All ranks hold the same bits after each step.
"""

import pytest
import torch

from mpidist import ddp as mddp
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]

BATCH, STEPS = 6, 10
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 5),
    )


def batches(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randint(
        5, (BATCH,), generator=generator
    )


def hash_of(module):
    return b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_k_ranks_are_one_with_k_batches(group, optimizer, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.005)
    alone = net()
    ours, theirs = (
        OPTIMIZERS[optimizer](ddp.parameters()),
        OPTIMIZERS[optimizer](alone.parameters()),
    )
    for step in range(STEPS):
        images, labels = batches(group.rank, step)
        ours.zero_grad()
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        ours.step()
        images, labels = [
            torch.cat(parts)
            for parts in zip(*(batches(rank, step) for rank in range(group.size)), strict=True)
        ]
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(alone(images), labels).backward()
        theirs.step()
        hashes = group.all_gather_object(hash_of(ddp))
        agree(group, len(set(hashes)) == 1, f"other bits after step {step}")
        pairs = list(zip(ddp.parameters(), alone.parameters(), strict=True))
        agree(
            group,
            all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs),
            f"other weights after step {step}",
        )


HOOKS = {
    "fp16": (None, mddp.fp16_compress_hook),
    "bf16": (None, mddp.bf16_compress_hook),
    "powersgd": (2, mddp.powerSGD_hook),
    "square": (2, mddp.batched_powerSGD_hook),
    "fp16 around powersgd": (2, mddp.fp16_compress_wrapper(mddp.powerSGD_hook)),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_the_same_bits_with_every_hook(group, name, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    rank, hook = HOOKS[name]
    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.005)
    state = (
        group
        if rank is None
        else mddp.PowerSGDState(group, rank, start_powerSGD_iter=2, min_compression_rate=1)
    )
    ddp.register_comm_hook(state, hook)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    for step in range(STEPS):
        images, labels = batches(group.rank, step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
        hashes = group.all_gather_object(hash_of(ddp))
        agree(group, len(set(hashes)) == 1, f"other bits after step {step}")


def test_gradients_that_autograd_leaves_conjugated(group):
    # The gradient of w in real(w * x) is a conjugated view of x, and stays one when copied back.
    for is_view in (True, False):
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        module.v = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        module.forward = lambda x, own=module: (
            (own.w * x).sum().real + (own.v.conj() * x[:2]).sum().imag
        )
        averaged = DistributedDataParallel(module, gradient_as_bucket_view=is_view)
        wanted = torch.full((3,), 1 - 1j * (group.size + 1) / 2, dtype=torch.complex64)
        for _ in range(2):
            averaged.zero_grad()
            averaged(torch.full((3,), 1 + 1j * (group.rank + 1), dtype=torch.complex64)).backward()
            agree(group, torch.allclose(module.w.grad, wanted), f"{is_view} {module.w.grad}")
