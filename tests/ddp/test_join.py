"""Uneven inputs, under ``join`` and torch's Join, with every divisor and every error."""

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from tests.ddp.nets import BATCH, Net, backward, close, same_everywhere, sgd
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]


def inputs_of(rank, size, order):
    """Return a rank's number of inputs: rank 0 ends first or last; the first to end has none."""
    return 2 * (rank if order == "rising" else size - 1 - rank)


def reference(size, order, by_initial, epochs):
    net = Net()
    optimizer = sgd(net)
    for epoch in range(epochs):
        for step in range(max(inputs_of(rank, size, order) for rank in range(size))):
            ranks = [rank for rank in range(size) if step < inputs_of(rank, size, order)]
            optimizer.zero_grad()
            for rank in ranks:
                backward(net, rank, step + 10 * epoch, 1 / (size if by_initial else len(ranks)))
            optimizer.step()
    return net


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("order", ["rising", "falling"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_training_with_uneven_inputs_equals_one_process(
    group, by_initial, order, in_thread, monkeypatch
):
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    ddp = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.0005)
    optimizer = sgd(ddp)
    for epoch in range(3):  # an epoch starts with the state of the last
        with ddp.join(divide_by_initial_world_size=by_initial):
            for step in range(inputs_of(group.rank, group.size, order)):
                optimizer.zero_grad()
                backward(ddp, group.rank, step + 10 * epoch)
                optimizer.step()
        agree(group, same_everywhere(group, ddp.module), f"ranks differ after epoch {epoch}")
    agree(
        group,
        close(ddp.module, reference(group.size, order, by_initial, 3)),
        "differs from one process",
    )


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("skip", [False, True])
def test_unused_parameters_and_a_rank_without_inputs(group, options, skip):
    ddp = DistributedDataParallel(
        Net(with_unused=True),
        process_group=group,
        bucket_cap_mb=1e-5,
        skip_all_reduce_unused_params=skip,
        **options,
    )
    optimizer = sgd(ddp)
    for epoch in range(2):
        with ddp.join():
            for step in range(inputs_of(group.rank, group.size, "rising") + epoch):
                optimizer.zero_grad()
                backward(ddp, group.rank, step)
                optimizer.step()
    agree(group, same_everywhere(group, ddp.module) and ddp.module.extra.weight.grad is None)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_buffers_come_from_a_rank_that_goes_on(group, order):
    ddp = DistributedDataParallel(torch.nn.BatchNorm1d(2), process_group=group)
    with ddp.join():
        for step in range(inputs_of(group.rank, group.size, order)):
            ddp(torch.full((BATCH, 2), float(step)) + torch.randn(BATCH, 2)).sum().backward()
    last = group.size - 1 if order == "rising" else 0
    expected = inputs_of(last, group.size, order)
    agree(
        group,
        int(ddp.module.num_batches_tracked) == expected,
        f"{ddp.module.num_batches_tracked} of {expected}",
    )
    gathered = group.all_gather_object(ddp.module.running_mean)
    agree(group, all(torch.equal(mean, gathered[0]) for mean in gathered), "buffers differ")


def test_an_evaluation_within_join_does_not_communicate(group):
    ddp = DistributedDataParallel(Net(), process_group=group)
    with ddp.join():
        for step in range(1 + group.rank):
            backward(ddp, group.rank, step)
            with torch.no_grad():
                backward_free = ddp(torch.randn(BATCH, 6))["y"]
            assert not backward_free.requires_grad
    agree(group, same_everywhere(group, ddp.module))


def test_the_first_rank_without_inputs_raises_on_all_if_asked_to(group):
    ddp = DistributedDataParallel(Net(), process_group=group)

    def run():
        with ddp.join(throw_on_early_termination=True):
            for step in range(3 if group.rank else 1):
                backward(ddp, group.rank, step)

    if group.size == 1:
        run()
        return
    # The text of torch's Join, for which programs look.
    text = raises_on_all(group, RuntimeError, run, "exhausted")
    agree(
        group,
        (
            "Detected at least one rank that exhausted inputs."
            if group.rank
            else "Rank 0 exhausted all inputs"
        )
        in text,
        text,
    )
    ddp.zero_grad()
    backward(ddp, group.rank, 0)  # outside of join
    gathered = group.all_gather_object(ddp.module.first.weight.grad)
    agree(
        group, all(torch.equal(gradient, gathered[0]) for gradient in gathered), "gradients differ"
    )


def test_the_rank_whose_weights_all_ranks_have_is_named_as_in_torch(group):
    ddp = DistributedDataParallel(Net(), process_group=group)
    agree(group, "join_uneven_inputs" not in ddp._get_ddp_logging_data())
    with ddp.join():
        for step in range(group.rank + 1):
            backward(ddp, group.rank, step)
    agree(group, ddp._authoritative_rank == group.size - 1, str(ddp._authoritative_rank))
    agree(group, ddp._get_ddp_logging_data()["join_uneven_inputs"] == 1)


def test_an_exception_within_join_is_raised_at_once(group):
    ddp = DistributedDataParallel(Net(), process_group=group)

    def run():
        with ddp.join():
            raise KeyError("a user's own")

    raises_on_all(group, KeyError, run, "a user's own")


@pytest.mark.mpi(min_size=2)
def test_a_pass_without_synchronization_on_one_rank_alone_is_refused(group):
    ddp = DistributedDataParallel(Net(), process_group=group)

    def run():
        with ddp.join():
            if group.rank == 0:
                with ddp.no_sync():
                    backward(ddp, group.rank, 0)
            else:
                backward(ddp, group.rank, 0)

    raises_on_all(group, DisagreementError, run, "no_sync")


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("by_initial", [True, False])
def test_torchs_join_with_a_sharded_optimizer(group, by_initial):
    """A rank without inputs steps its shard with the average of the other ranks' gradients."""
    net = Net()
    net.wide.requires_grad_(False)  # the optimizer needs one dtype
    ddp = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(
        [p for p in net.parameters() if p.requires_grad], torch.optim.SGD, lr=0.1
    )
    for epoch in range(2):
        with Join([ddp, optimizer], divide_by_initial_world_size=by_initial):
            for step in range(inputs_of(group.rank, group.size, "rising")):
                ddp.zero_grad()
                backward(ddp, group.rank, step + 10 * epoch)
                optimizer.step()
    expected = Net()
    expected.wide.requires_grad_(False)
    plain = sgd(expected)
    for epoch in range(2):
        for step in range(inputs_of(group.size - 1, group.size, "rising")):
            ranks = [
                rank for rank in range(group.size) if step < inputs_of(rank, group.size, "rising")
            ]
            plain.zero_grad()
            for rank in ranks:
                backward(
                    expected,
                    rank,
                    step + 10 * epoch,
                    1 / (group.size if by_initial else len(ranks)),
                )
            plain.step()
    agree(
        group,
        same_everywhere(group, ddp.module) and close(ddp.module, expected),
        "differs from one process",
    )
