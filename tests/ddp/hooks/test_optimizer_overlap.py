"""Optimizers stepped within the hook, against a step after the backward pass."""

import pytest
import torch

from mpidist.ddp.hooks.default import allreduce_hook, bf16_compress_wrapper
from mpidist.ddp.hooks.optimizer_overlap import OptimizerHookState, hook_then_optimizer
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


class Plain:
    """Gradient descent as a functional optimizer."""

    def step_param(self, parameter, gradient):
        with torch.no_grad():
            parameter.sub_(gradient, alpha=0.1)


def trained(group, change, steps_itself):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.0001)
    change(ddp)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        ddp.zero_grad()
        ddp(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * step + group.rank))
        ).square().sum().backward()
        if steps_itself:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_steps_within_the_hook_equal_steps_after_the_backward_pass(group, monkeypatch):
    for between_nodes in (False, True):
        monkeypatch.setattr(type(group), "is_single_node", not between_nodes)
        expected = trained(group, lambda ddp: None, steps_itself=True)
        hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(Plain()))
        got = trained(
            group, lambda ddp, hook=hook: ddp.register_comm_hook(group, hook), steps_itself=False
        )
        agree(group, torch.allclose(got, expected, atol=1e-6), f"between nodes: {between_nodes}")
    narrow = hook_then_optimizer(bf16_compress_wrapper(allreduce_hook), OptimizerHookState(Plain()))
    got = trained(group, lambda ddp: ddp.register_comm_hook(group, narrow), steps_itself=False)
    agree(group, torch.allclose(got, expected, atol=2e-2), "around a hook that compresses")
    none = hook_then_optimizer(allreduce_hook, OptimizerHookState(Plain(), params=[]))
    got = trained(group, lambda ddp: ddp.register_comm_hook(group, none), steps_itself=True)
    agree(group, torch.allclose(got, expected, atol=1e-6), "no parameter chosen")
    raises_on_all(group, ValueError, lambda: OptimizerHookState(object()), "step_param")
