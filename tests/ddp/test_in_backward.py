"""Optimizers of _apply_optimizer_in_backward step with the average of all ranks."""

import gc
import weakref

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from tests.ddp.nets import Net, backward, close, reference, same_everywhere
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_optimizers_step_with_the_average(group, view, when):
    net = Net(with_unused=True)
    trained = [p for p in net.parameters() if p.requires_grad]
    if when == "before":
        _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.1})
    ddp = DistributedDataParallel(
        net, process_group=group, gradient_as_bucket_view=view, find_unused_parameters=True
    )
    if when == "after":
        _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.1})
    for step in range(3):
        backward(ddp, group.rank, step)
        agree(group, all(p.grad is None for p in trained), "gradients are cleared")
    expected = reference(group.size, 3, with_unused=True)
    agree(group, same_everywhere(group, net) and close(net, expected))


def test_optimizers_do_not_step_while_gradients_accumulate(group):
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 1.0})
    ddp = DistributedDataParallel(net, process_group=group)
    x = torch.full((1, 1), float(group.rank + 1))
    with ddp.no_sync():
        ddp(x).sum().backward()
    agree(group, net.weight.item() == 0 and float(net.weight.grad) == group.rank + 1)
    ddp(x).sum().backward()
    agree(
        group, net.weight.item() == -(group.size + 1) and net.weight.grad is None, str(net.weight)
    )


@pytest.mark.mpi(min_size=2)
def test_optimizers_of_one_rank_alone_are_refused_on_all(group):
    net = torch.nn.Linear(1, 1)
    if group.rank == 0:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 1.0})
    call = lambda: DistributedDataParallel(net, process_group=group)  # noqa: E731
    raises_on_all(group, DisagreementError, call, "ranks differ. rank 0: the settings")


def test_a_rank_without_inputs_does_not_step(group):
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 1.0})
    ddp = DistributedDataParallel(net, process_group=group)
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + group.rank):
            ddp(torch.ones(1, 1)).sum().backward()
        stepped = net.weight.item()
    agree(
        group,
        stepped == -(1 + group.rank) and net.weight.item() == -group.size,
        f"{stepped} {net.weight}",
    )


def test_parameters_do_not_outlive_the_module(group):
    """torch keeps the node that accumulates a parameter's gradient, which refers to it."""
    net = torch.nn.Linear(2, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(net, process_group=group)
    ddp(torch.ones(1, 2)).sum().backward()
    left = [weakref.ref(parameter) for parameter in net.parameters()]
    del net, ddp
    gc.collect()
    agree(group, not any(one() is not None for one in left))
