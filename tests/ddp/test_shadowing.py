"""Own gradients of a rank that shadows the other ranks' passes."""

import contextlib
import itertools

import pytest
import torch
from torch.distributed.algorithms.join import Join

from mpidist.ddp.hooks.default import allreduce_hook
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


class Two(torch.nn.Module):
    """One parameter that every pass uses, and one that no pass uses."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.never = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (self.weight * x).sum()


def gradients_of(group, context, ddp, set_to_none, accumulates=False):
    """Train for two epochs in the order step, zero_grad; return the gradient at each step."""
    optimizer, seen = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    for _ in range(2):
        with context(ddp):
            for _ in range(1 + group.rank):
                if accumulates:
                    with ddp.no_sync():
                        ddp(torch.ones(3)).backward()
                ddp(torch.ones(3)).backward()
                seen.append(ddp.module.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad(set_to_none)
    return seen


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("is_torchs", [False, True])
def test_the_next_epoch_begins_with_the_gradients_that_the_last_one_left(group, view, is_torchs):
    def context(ddp):
        return (
            Join([ddp], divide_by_initial_world_size=False)
            if is_torchs
            else ddp.join(divide_by_initial_world_size=False)
        )

    kinds = [{"find_unused_parameters": True}, {"static_graph": True}]
    kinds.append({"find_unused_parameters": True, "skip_all_reduce_unused_params": True})
    for options, hooked, accumulates, set_to_none in itertools.product(
        kinds, [False, True], [False, True], [False, True]
    ):
        ddp = DistributedDataParallel(Two(), gradient_as_bucket_view=view, **options)
        if hooked:  # a hook divides by the number of ranks
            ddp.register_comm_hook(None, allreduce_hook)
        seen = gradients_of(group, context, ddp, set_to_none, accumulates)
        weight = 2.0 if accumulates else 1.0
        if not hooked:
            wanted = [torch.full((3,), weight)] * len(seen)
        else:
            wanted = [
                torch.full((3,), weight * (group.size - step) / group.size)
                for step in range(1 + group.rank)
            ] * 2
        text = (
            f"{options} hooked {hooked} accumulates {accumulates} set_to_none {set_to_none}: {seen}"
        )
        agree(group, all(torch.allclose(a, b) for a, b in zip(seen, wanted, strict=True)), text)
        agree(group, ddp.module.never.grad is None, text)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("view", [True, False])
def test_a_gradient_stays_the_tensor_it_was(group, view):
    """None stays None, a user's tensor stays the same, gradients of no_sync keep their values."""
    for kind, rebuilt in itertools.product(["none", "own", "local"], [False, True]):
        ddp = DistributedDataParallel(
            Two(), process_group=group, gradient_as_bucket_view=view, find_unused_parameters=True
        )
        if rebuilt:
            # The first pass, which rank 0 shadows, rebuilds the buckets.
            ddp._set_static_graph()
        own = torch.full((3,), 7.0)
        with ddp.join():
            if kind == "local":
                with ddp.no_sync() if group.rank == 0 else contextlib.nullcontext():
                    ddp.module(torch.full((3,), 7.0)).backward()
            elif kind == "own":
                ddp.module.weight.grad = own
            if group.rank:
                ddp.zero_grad()
                ddp(torch.ones(3)).backward()
        if group.rank == 0:
            gradient = ddp.module.weight.grad
            right = gradient is None if kind == "none" else bool((gradient == 7).all())
            right = right and (kind != "own" or gradient is own)
        else:
            right = bool(
                torch.allclose(
                    ddp.module.weight.grad, torch.full((3,), (group.size - 1) / group.size)
                )
            )
        agree(group, right, f"{kind}: {ddp.module.weight.grad}")
