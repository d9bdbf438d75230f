"""State of a module: its state_dict, copies and pickles, and the end of its hooks."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

from mpidist.comm import init
from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import MpidistError
from tests.ddp.nets import Net, backward, close, reference, same_everywhere, sgd, train
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


def test_state_dict_has_torchs_names(group):
    ddp = DistributedDataParallel(Net(), process_group=group)
    agree(group, list(ddp.state_dict()) == [f"module.{name}" for name in Net().state_dict()])
    file = io.BytesIO()
    torch.save(train(group, ddp, 2).state_dict(), file)
    file.seek(0)
    other = DistributedDataParallel(Net(), process_group=group)
    other.module.load_state_dict(torch.load(file, weights_only=True))
    agree(group, close(other.module, ddp.module))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
@pytest.mark.parametrize("static", [False, True])
def test_a_copy_trains_on(world, way, static):
    ddp = DistributedDataParallel(Net(), static_graph=static, bucket_cap_mb=0.0005)
    train(world, ddp, 2)
    again = way(ddp)
    agree(world, close(again.module, ddp.module) and again.settings == ddp.settings)
    optimizer = sgd(again)
    for step in range(2, 4):
        optimizer.zero_grad()
        backward(again, world.rank, step)
        optimizer.step()
    agree(
        world,
        same_everywhere(world, again.module) and close(again.module, reference(world.size, 4)),
    )
    agree(world, not close(again.module, ddp.module), "the copy has weights of its own")


def test_only_the_default_group_can_be_left_out(group):
    ddp = DistributedDataParallel(Net(), process_group=group)
    raises_on_all(group, MpidistError, lambda: copy.deepcopy(ddp), "state_dict()")


def test_a_module_is_free_when_its_wrapper_goes(group):
    net = Net()
    ddp = DistributedDataParallel(net, process_group=group)
    backward(ddp, group.rank, 0)
    gone = weakref.ref(ddp.reducer)
    del ddp
    gc.collect()
    agree(group, gone() is None, "the reducer lives on")
    if group.rank == 0:
        backward(net, 0, 0)  # on one rank: nothing is averaged any more
    again = DistributedDataParallel(net, process_group=group)
    train(group, again, 2)
    agree(group, same_everywhere(group, net))


@pytest.mark.parametrize("view", [True, False])
def test_two_backward_passes_of_one_forward_pass(group, view):
    """Each pass is averaged; the second adds to the average of the first."""
    ddp = DistributedDataParallel(
        torch.nn.Linear(2, 1), process_group=group, gradient_as_bucket_view=view
    )
    loss = (ddp(torch.ones(1, 2)) * (group.rank + 1)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    agree(
        group, bool((ddp.module.weight.grad == group.size + 1).all()), str(ddp.module.weight.grad)
    )


@pytest.mark.parametrize("view", [True, False])
def test_two_forward_passes_then_their_backward_passes(group, view):
    ddp = DistributedDataParallel(
        torch.nn.Linear(2, 1), process_group=group, gradient_as_bucket_view=view
    )
    losses = [(ddp(torch.ones(1, 2)) * (group.rank + 1)).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    agree(
        group, bool((ddp.module.weight.grad == group.size + 1).all()), str(ddp.module.weight.grad)
    )
    sum((ddp(torch.ones(1, 2)) * (group.rank + 1)).sum() for _ in range(2)).backward()
    agree(
        group,
        bool((ddp.module.weight.grad == 2 * (group.size + 1)).all()),
        str(ddp.module.weight.grad),
    )


def test_gradients_cleared_between_forward_and_backward(group):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    for set_to_none in (True, False, True):
        loss = (ddp(torch.ones(1, 2)) * (group.rank + 1)).sum()
        ddp.zero_grad(set_to_none)
        loss.backward()
        agree(
            group,
            bool((ddp.module.weight.grad == (group.size + 1) / 2).all()),
            str(ddp.module.weight.grad),
        )


@pytest.mark.parametrize("view", [True, False])
def test_gradients_whose_memory_a_cast_has_replaced_are_averaged(group, view):
    net = torch.nn.Linear(3, 2)
    ddp = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=view)
    x = torch.full((4, 3), group.rank + 1.0)
    mean = 2.0 * (group.size + 1)
    for place in range(4):
        ddp(x).sum().backward()
        agree(group, bool((net.weight.grad == mean).all()), f"pass {place}: {net.weight.grad}")
        if place % 2 == 0:
            ddp.double()
            ddp.float()
        ddp.zero_grad(set_to_none=place > 1)
    ddp.double()
    raises_on_all(
        group, RuntimeError, lambda: ddp(x.double()).sum().backward(), "was torch.float32"
    )


def test_frameworks_find_torchs_own_methods(group):
    net = Net(with_unused=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, ["extra.weight", "extra.bias"]
    )
    ddp = DistributedDataParallel(net, process_group=group)
    ddp._set_static_graph()
    agree(
        group,
        ddp.settings.static_graph
        and not any("extra.weight" in names for names in ddp.bucket_plan()["buckets"]),
    )
    agree(group, close(train(group, ddp, 2), reference(group.size, 2, with_unused=True)))


@pytest.mark.parametrize("static", [False, True])
def test_unused_buckets_do_not_travel(group, static):
    ddp = DistributedDataParallel(
        Net(with_unused=True),
        process_group=group,
        find_unused_parameters=not static,
        static_graph=static,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.00001,  # one bucket per parameter
    )
    names = []

    def hook(state, bucket):
        names.append(bucket.names())
        return group.all_reduce(bucket.buffer(), "avg", async_op=True).get_future()

    ddp.register_comm_hook(None, hook)
    net = train(group, ddp, 3)
    agree(
        group,
        same_everywhere(group, net) and close(net, reference(group.size, 3, with_unused=True)),
    )
    sent = [name for bucket in names for name in bucket]
    agree(group, sent.count("extra.weight") == 1 and sent.count("first.weight") == 3, str(sent))
    agree(group, net.extra.weight.grad is None)
    if not static:
        extra = tuple(range(group.size))
        raises_on_all(
            group,
            RuntimeError,
            lambda: train(group, ddp, 1, True, extra),
            "no rank used it in the first",
        )
        raises_on_all(
            group,
            RuntimeError,
            lambda: train(group, ddp, 1, True, (0,)),
            "rank 0: parameter 'extra.",
        )
        agree(group, same_everywhere(group, train(group, ddp, 2)), "and the next step is right")


def test_without_a_group_all_ranks_take_part(world):
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    agree(world, ddp.process_group is init())
    (ddp(torch.ones(1, 1)) * (world.rank + 1)).sum().backward()
    agree(world, float(ddp.module.bias.grad) == (world.size + 1) / 2)
