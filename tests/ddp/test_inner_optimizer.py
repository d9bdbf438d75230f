"""Outer steps whose inner optimizer is sharded among the ranks of a replica."""

import pytest
import torch

from mpidist.checkpoint import load, save
from mpidist.ddp import DiLoCo, DistributedDataParallel
from mpidist.errors import CheckpointError
from mpidist.optim import OSS, ZeroRedundancyOptimizer
from tests.tools.support import agree, raises_on_all

OPTIONS = {"every": 4, "overlap": 2, "fragments": 2}


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def sharded(model, replica, **options):
    return OSS(model.parameters(), torch.optim.AdamW, replica, lr=0.05, **options)


def plain(model, replica):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def begun(group, replica, make=sharded):
    """Return a module whose gradients are averaged in the replica, and its outer steps."""
    model = DistributedDataParallel(net(), process_group=replica)
    return model, DiLoCo(model, make(model, replica), process_group=group, **OPTIONS)


def train(model, diloco, rank, first, last):
    for number in range(first, last):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))
        diloco.inner.zero_grad()
        (model(x) - x[:, :3].sin()).square().mean().backward()
        diloco.inner.step()


def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.fixture
def folder(group, tmp_path_factory):
    return group.broadcast_object(str(tmp_path_factory.mktemp("run")) if group.rank == 0 else None)


@pytest.mark.mpi
def test_a_sharded_optimizer_trains_and_goes_on_with_the_bits_of_a_whole_one(group, folder):
    replica = group.split(group.rank // 2)
    model, diloco = begun(group, replica, plain)
    train(model, diloco, group.rank, 0, 12)
    first, of_first = begun(group, replica)
    train(first, of_first, group.rank, 0, 5)
    # An average is on its way.
    save(folder, 5, model=first, hook_state=of_first, group=group)
    train(first, of_first, group.rank, 5, 12)
    second, of_second = begun(group, replica)
    load(folder, model=second, hook_state=of_second, group=group)
    train(second, of_second, group.rank, 5, 12)
    agree(group, same(first, model), "whole")
    agree(group, same(second, model) and of_second.steps == 12, "resumed")
    # With torch's names and partition.
    third = DistributedDataParallel(net(), process_group=replica)
    inner = ZeroRedundancyOptimizer(third.parameters(), torch.optim.AdamW, replica, lr=0.05)
    of_third = DiLoCo(third, inner, process_group=group, **OPTIONS)
    train(third, of_third, group.rank, 0, 12)
    agree(group, same(third, model), "torch's names")
    replica.close()


@pytest.mark.mpi
def test_master_copies_of_a_wire_follow_the_outer_steps(group, folder):
    replica = group.split(group.rank // 2)

    def made():
        model = DistributedDataParallel(net(), process_group=replica)
        with torch.no_grad():
            model.module[0].weight.add_(group.rank // 2)
        inner = sharded(model, replica, wire="bf16", weight_decay=0.0)
        return model, inner

    # The optimizer has stepped before rank 0's parameters come.
    model, inner = made()
    for group_of in inner.param_groups:
        group_of["lr"] = 0.0
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        inner.step()
        diloco = DiLoCo(model, inner, process_group=group, every=100)
        held = [one.detach().clone() for one in model.parameters()]
        diloco.remove()
    model(torch.ones(2, 6)).sum().backward()
    inner.step()
    fine = all(
        torch.allclose(one, own, rtol=0.01, atol=0)
        for one, own in zip(held, model.parameters(), strict=True)
    )
    agree(group, fine, "broadcast")

    def outer_steps():
        model, inner = made()
        return model, DiLoCo(model, inner, process_group=group, **OPTIONS)

    first, of_first = outer_steps()
    train(first, of_first, group.rank, 0, 6)
    save(folder, 6, model=first, hook_state=of_first, group=group)
    train(first, of_first, group.rank, 6, 10)
    second, of_second = outer_steps()
    load(folder, model=second, hook_state=of_second, group=group)
    train(second, of_second, group.rank, 6, 10)
    agree(group, same(first, second), "resumed")
    replica.close()


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:.*random number generators are reseeded")
def test_other_ranks_begin_from_the_global_parameters_with_all_shards(group, folder):
    half = group.split(0 if group.rank <= group.size // 2 else None)
    held = None
    if half is not None:
        model, diloco = begun(half, half)
        train(model, diloco, half.rank, 0, 6)
        save(folder, 6, model=model, hook_state=diloco, group=half)
        held = (
            diloco.inner.state_dict(all_ranks=True),
            diloco.global_state(model.module.state_dict(), dict(model.module.named_parameters())),
        )
    moments, parameters = group.broadcast_object(held)
    replica = group.split(group.rank % 2)
    is_other = group.size > 1
    for make in (sharded, plain):
        model, diloco = begun(group, replica, make)
        if make is plain and not is_other:
            continue
        load(folder, model=model, hook_state=diloco, group=group)
        inner = diloco.inner
        found = inner.state_dict(all_ranks=True) if make is sharded else inner.state_dict()
        fine = all(
            torch.equal(value, found["state"][number][name])
            for number, values in moments["state"].items()
            for name, value in values.items()
        )
        if is_other:
            own = model.module.state_dict()
            fine = fine and all(torch.equal(value, own[name]) for name, value in parameters.items())
        agree(group, fine and diloco.steps == 6, make.__name__)
        train(model, diloco, group.rank, 6, 9)
        diloco.sync()
    replica.close()
    if half is not None:
        half.close()


@pytest.mark.mpi
def test_a_shard_of_other_ranks_is_refused_before_anything_is_loaded(group, folder):
    model, diloco = begun(group, group)
    train(model, diloco, group.rank, 0, 3)
    wrong = diloco.state_dict() | {"rank": group.size}
    before = [one.clone() for one in model.parameters()]
    raises_on_all(group, ValueError, lambda: diloco.load_state_dict(wrong), "merges shards")
    agree(group, all(map(torch.equal, before, model.parameters())))
    save(folder, 3, model=model, hook_state=Other(), group=group)
    raises_on_all(
        group,
        CheckpointError,
        lambda: load(folder, model=model, hook_state=diloco, group=group),
        "another hook",
    )


class Other:
    def state_dict(self):
        return {"format": "other"}

    def load_state_dict(self, state):
        pass


@pytest.mark.mpi(min_size=2)
def test_shards_over_ranks_without_equal_gradients_are_refused_on_all_ranks(group):
    replica = group.split(group.rank)
    bare, alone = net(), DistributedDataParallel(net(), process_group=replica)
    whole = DistributedDataParallel(net(), process_group=group)
    cases = [
        (bare, sharded(bare, group), group, "equal gradients"),
        (alone, sharded(alone, group), group, "equal gradients"),
        (whole, sharded(whole, group), replica, "must hold them all"),
        (whole, sharded(whole, group, one_copy=True), group, "one copy"),
    ]
    for model, inner, over, text in cases:
        raises_on_all(
            group,
            ValueError,
            lambda model=model, inner=inner, over=over: DiLoCo(
                model, inner, every=2, process_group=over
            ),
            text,
        )
    replica.close()
