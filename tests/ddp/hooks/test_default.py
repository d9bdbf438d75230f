"""Default hooks against the plain average, and torch's own hooks on our DDP."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from mpidist.ddp.hooks import default
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


def gradients(group, state, hook):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.0005)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for step in range(3):
        ddp.zero_grad()
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + group.rank))
        ddp(x).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


HOOKS = {
    "allreduce": (default.allreduce_hook, 1e-6),
    "fp16": (default.fp16_compress_hook, 2e-3),
    "bf16": (default.bf16_compress_hook, 2e-2),
    "fp16 around allreduce": (default.fp16_compress_wrapper(default.allreduce_hook), 2e-3),
    "bf16 around allreduce": (default.bf16_compress_wrapper(default.allreduce_hook), 2e-2),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_hooks_average(group, name, in_thread, monkeypatch):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    hook, tolerance = HOOKS[name]
    expected = gradients(group, None, None)
    got = gradients(group, group, hook)
    pairs = list(zip(got, expected, strict=True))
    agree(
        group,
        all(torch.allclose(a, b, rtol=tolerance, atol=tolerance * b.abs().max()) for a, b in pairs),
        name,
    )
    changed = any(not torch.equal(a, b) for a, b in pairs)
    agree(
        group,
        changed == (name != "allreduce"),
        "half precision leaves its mark, and the plain hook none",
    )


def test_noop_leaves_each_ranks_own(group):
    got = gradients(group, None, default.noop_hook)
    flat = torch.cat([g.flatten() for g in got])
    rows = torch.empty(group.size * flat.numel())
    group.all_gather_into_tensor(rows, flat)
    rows = rows.view(group.size, -1)
    agree(group, group.size == 1 or not torch.equal(rows[0], rows[1]))
    expected = torch.cat([g.flatten() for g in gradients(group, None, None)])
    agree(group, torch.allclose(rows.mean(0), expected, rtol=1e-5, atol=1e-5))


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_torchs_own_hooks_run(group, name):
    tolerance = {"allreduce_hook": 1e-6, "fp16_compress_hook": 2e-3, "bf16_compress_hook": 2e-2}[
        name
    ]
    expected = gradients(group, None, None)
    got = gradients(group, dist.group.WORLD, getattr(torch_hooks, name))
    ok = all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * b.abs().max())
        for a, b in zip(got, expected, strict=True)
    )
    agree(group, ok, name)


@pytest.mark.parametrize("name", HOOKS)
def test_complex_buckets_travel_as_they_are(group, name):
    class Phase(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((5,), 1 + 2j))

        def forward(self, x):
            return (self.weight * x).abs().square().sum()

    ddp = DistributedDataParallel(Phase(), process_group=group)
    ddp.register_comm_hook(group, HOOKS[name][0])
    ddp(torch.full((5,), 1.0 + group.rank)).backward()
    mean = sum((1 + rank) ** 2 for rank in range(group.size)) / group.size
    agree(
        group,
        torch.allclose(ddp.module.weight.grad, torch.full((5,), 2 * mean * (1 + 2j))),
        str(ddp.module.weight.grad),
    )
