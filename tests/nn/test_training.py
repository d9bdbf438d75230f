"""Training with remote modules: gradients and weights against one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpidist.autograd as dist_autograd
import mpidist.rpc as rpc
from mpidist.nn import RemoteModule
from mpidist.optim import DistributedOptimizer
from tests.nn.nets import net

pytestmark = pytest.mark.mpi(min_size=1)


class Divided(nn.Module):
    """A net with a remote module that is used twice."""

    def __init__(self, middle):
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.middle = middle
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(self.middle(hidden) + self.middle(2 * hidden)).square().mean()


def nearly_equal(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def gradients_of(rrefs, context_id):
    found = dist_autograd.get_gradients(context_id)
    return [found[rref.local_value()] for rref in rrefs]


@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_gradients_reach_the_remote_part_and_the_local_one(workers, to, mode):
    torch.manual_seed(1)
    divided = Divided(RemoteModule(to, net))
    plain = copy.deepcopy(divided.first), net(), copy.deepcopy(divided.last)
    x = torch.randn(6, 5)
    hidden = plain[0](x)
    expected_loss = plain[2](plain[1](hidden) + plain[1](2 * hidden)).square().mean()
    expected_loss.backward()
    with dist_autograd.context() as context_id:
        loss = divided(x)
        nearly_equal(loss, expected_loss)
        dist_autograd.backward(context_id, [loss], mode=mode)
        here = dist_autograd.get_gradients(context_id)
        for ours, theirs in zip((divided.first, divided.last), (plain[0], plain[2]), strict=True):
            for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                nearly_equal(here[parameter], other.grad)
        there = rpc.rpc_sync(to, gradients_of, (divided.middle.remote_parameters(), context_id))
        for gradient, other in zip(there, plain[1].parameters(), strict=True):
            nearly_equal(gradient, other.grad)


def test_a_pass_awaits_no_gradient_of_states_and_parameters(workers, to):
    module = RemoteModule(to, net)
    with dist_autograd.context() as context_id:
        state = module.state_dict()
        module.load_state_dict(
            {
                name: nn.Parameter(value) if value.is_floating_point() else value
                for name, value in state.items()
            }
        )
        list(module.named_parameters())
        module.train()
        # FAST mode awaits every message with a gradient; none of these four has one.
        dist_autograd.backward(context_id, [module(torch.ones(2, 3)).sum()])


def test_steps_are_those_of_one_process(workers, to):
    torch.manual_seed(2)
    divided = Divided(RemoteModule(to, net))
    plain = nn.ModuleList((copy.deepcopy(divided.first), net(), copy.deepcopy(divided.last)))
    settings = {"lr": 0.05, "momentum": 0.5}
    local = torch.optim.SGD(plain.parameters(), **settings)
    references = [rpc.RRef(parameter) for parameter in divided.parameters()]
    distributed = DistributedOptimizer(
        torch.optim.SGD, [*references, *divided.middle.parameters()], **settings
    )
    losses = []
    for _ in range(4):
        x = torch.randn(6, 5)
        local.zero_grad()
        hidden = plain[0](x)
        plain[2](plain[1](hidden) + plain[1](2 * hidden)).square().mean().backward()
        local.step()
        with dist_autograd.context() as context_id:
            loss = divided(x)
            dist_autograd.backward(context_id, [loss])
            distributed.step(context_id)
        losses.append(loss.item())
    renamed = dict(zip(divided.state_dict(), plain.state_dict().values(), strict=True))
    nearly_equal(dict(divided.state_dict()), renamed)
    assert losses[-1] != losses[0]
