"""Allocation of buckets: in the constructor and after the first backward pass, by all ranks.

A forward pass allocates none.
"""

import copy

import pytest
import torch

from mpidist.comm import init
from mpidist.ddp.buckets.layout import Layout
from mpidist.ddp.buckets.plan import limits_of
from mpidist.ddp.buckets.settings import Settings
from mpidist.ddp.module import DistributedDataParallel
from tests.ddp.nets import (
    Net,
    backward,
    close,
    data,
    loss_of,
    reference,
    same_everywhere,
    sgd,
    train,
)
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_a_forward_pass_of_one_rank_alone_communicates_nothing(group, options):
    """Rank 0 evaluates before the first step and after each, with gradients enabled."""
    ddp = DistributedDataParallel(
        Net(), process_group=group, broadcast_buffers=False, bucket_cap_mb=0.0005, **options
    )
    optimizer = sgd(ddp)
    for step in range(4):
        if group.rank == 0:
            before = group.journal.sequence
            x, target = data(0, 50)
            loss_of(ddp(x), target)
            assert group.journal.sequence == before, "the forward pass communicated"
        optimizer.zero_grad()
        backward(ddp, group.rank, step)
        optimizer.step()
    agree(group, same_everywhere(group, ddp.module) and close(ddp.module, reference(group.size, 4)))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_copy_on_one_rank_alone_communicates_nothing(world, options):
    """One rank copies a module alone; a copy by all ranks shares memory after its first pass."""
    ddp = DistributedDataParallel(Net(), process_group=None, broadcast_buffers=False, **options)
    train(world, ddp, 2)
    if world.rank == 0:
        before = init().journal.sequence
        alone = copy.deepcopy(ddp)
        alone(data(0, 0)[0])
        assert init().journal.sequence == before, "the copy communicated"
    again = copy.deepcopy(ddp)
    optimizer = sgd(again)
    for step in range(2, 5):
        optimizer.zero_grad()
        backward(again, world.rank, step)
        optimizer.step()
    agree(
        world,
        same_everywhere(world, again.module) and close(again.module, reference(world.size, 5)),
    )
    memories = [
        [bucket.node_tensor is not None for bucket in net.reducer.layout.buckets]
        for net in (ddp, again)
    ]
    agree(world, memories[0] == memories[1], str(memories))


def test_gradients_keep_their_values_when_buckets_are_laid_out_again(group):
    ddp = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.0005)
    before = ddp.reducer.layout.plan
    backward(ddp, group.rank, 0)
    agree(group, ddp.reducer.layout.plan != before and len(before) > 2, str(before))
    expected = Net()
    for rank in range(group.size):
        backward(expected, rank, 0, 1 / group.size)
    pairs = [
        (p, q)
        for p, q in zip(ddp.module.parameters(), expected.parameters(), strict=True)
        if p.requires_grad
    ]
    agree(group, all(torch.allclose(p.grad, q.grad, atol=1e-5) for p, q in pairs))
    views = ddp.reducer.layout.views
    agree(
        group,
        all(p.grad is views[place] for place, (p, _) in enumerate(pairs)),
        "gradients are views of the new buckets",
    )


def test_a_saved_layout_is_used(group):
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]
    names = ["a", "b", "c"]
    layout = Layout(parameters, names, [False, False, True], group, Settings(limits_of(1e-5)))
    agree(
        group, (2,) in layout.plan and layout.sparse == {layout.plan.index((2,))}, str(layout.plan)
    )
    saved = layout.saved_plan()
    layout.rebuild([0, 1, 2])
    agree(group, layout.is_rebuilt and layout.plan != saved["buckets"], str(layout.plan))
    layout.load_plan(saved)
    agree(group, layout.saved_plan() == saved)
    with pytest.raises(ValueError, match="sparse gradients together with others"):
        layout.load_plan({"buckets": [["a"], ["b", "c"]], "is_rebuilt": True})
    agree(group, layout.saved_plan() == saved, "a refused plan changed the layout")
