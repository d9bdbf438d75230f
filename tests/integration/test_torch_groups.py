"""Lifecycle of torch's groups on mpidist: creation without variables, splitting, destruction."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpidist.errors import GroupError
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture
def fresh(world):
    """No default group before and after."""
    assert not dist.is_initialized()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()
    world.barrier()
    yield
    world.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def default(fresh):
    dist.init_process_group("mpidist")


def total(world, group=None):
    tensor = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def triangle(n):
    return n * (n + 1) / 2


@pytest.mark.parametrize(
    "options", [{}, {"init_method": "mpi://"}, {"timeout": timedelta(minutes=2)}], ids=str
)
def test_no_environment_variable_is_needed(world, fresh, options):
    dist.init_process_group("mpidist", **options)
    ok = (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (
        world.rank,
        world.size,
        "mpidist",
    )
    agree(
        world,
        ok and total(world) == triangle(world.size),
        f"{dist.get_rank()} of {dist.get_world_size()}",
    )


def test_right_numbers_are_accepted(world, fresh):
    dist.init_process_group("mpidist", init_method="mpi://", rank=world.rank, world_size=world.size)
    agree(world, total(world) == triangle(world.size))


@pytest.mark.parametrize("wrong", ["rank", "world_size"])
def test_wrong_numbers_are_refused(world, fresh, wrong):
    numbers = {"rank": world.rank, "world_size": world.size}
    numbers[wrong] += 1

    def begin():
        dist.init_process_group("mpidist", init_method="mpi://", **numbers)

    text = raises_on_all(world, ValueError, begin, f"{wrong}={numbers[wrong]}")
    # And says what MPI knows; one process that is told of others was not started by MPI.
    if world.size == 1 and wrong == "world_size":
        assert "MPI sees a world of one" in text
    else:
        assert f"{wrong}={getattr(world, 'rank' if wrong == 'rank' else 'size')}" in text
    dist.init_process_group("mpidist")
    agree(world, total(world) == triangle(world.size), "the group after it")


def test_a_store_of_the_users_own_with_a_wrong_size_is_refused(world, fresh):
    def begin():
        dist.init_process_group(
            "mpidist", store=dist.HashStore(), rank=world.rank, world_size=world.size + 1
        )

    raises_on_all(world, ValueError, begin, f"world_size={world.size + 1}")


def test_groups_are_made_again_and_again(world, fresh):
    before = set(threading.enumerate())  # an earlier test may have used a group that stays
    for _ in range(3):
        dist.init_process_group("mpidist")
        sub = dist.new_group(list(range(world.size)))
        ok = total(world) == triangle(world.size) == total(world, sub)
        work = dist.all_reduce(torch.zeros(3), async_op=True)
        work.wait()
        dist.destroy_process_group()
        agree(world, ok and not dist.is_initialized())
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("mpidist-")]
    agree(
        world,
        set(left) <= {"mpidist-watchdog", "mpidist-store", "mpidist-receives"},
        f"threads left: {left}",
    )


def test_a_destroyed_group_is_refused(world, default):
    default_group = dist.group.WORLD
    sub = dist.new_group()
    total(world, sub)
    dist.destroy_process_group(sub)
    raises_on_all(world, ValueError, lambda: dist.all_reduce(torch.ones(1), group=sub))
    raises_on_all(world, GroupError, lambda: sub.allreduce([torch.ones(1)]), "closed")
    agree(world, total(world) == triangle(world.size), "the world after it")
    dist.destroy_process_group()
    raises_on_all(world, GroupError, lambda: default_group.allreduce([torch.ones(1)]), "closed")


@pytest.mark.parametrize("local", [False, True], ids=["all_call", "members_call"])
def test_a_group_of_some(world, default, local):
    ranks = list(range(0, world.size, 2))
    if local and world.rank not in ranks:
        group = None
    else:
        group = dist.new_group(ranks, use_local_synchronization=local)
    ok, text = True, ""
    if world.rank in ranks:
        text = f"{dist.get_rank(group)} of {dist.get_world_size(group)}, {dist.get_backend(group)}"
        ok = text == f"{ranks.index(world.rank)} of {len(ranks)}, mpidist"
        ok = ok and total(world, group) == sum(rank + 1 for rank in ranks)
        ok = ok and dist.get_process_group_ranks(group) == ranks
        dist.destroy_process_group(group)
    elif not local:
        ok = group is dist.GroupMember.NON_GROUP_MEMBER
    agree(world, ok and total(world) == triangle(world.size), text)


@pytest.mark.parametrize("local", [False, True], ids=["all_call", "members_call"])
def test_groups_of_all_ranks_behind_one_that_some_have_made(world, default, local):
    """torch's names of groups differ between the ranks then."""
    if world.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    ranks = list(range(world.size))
    groups = [dist.new_group(ranks, use_local_synchronization=local) for _ in range(2)]
    groups.append(dist.group.WORLD.split_group(ranks, group_name=groups[0].group_name + "-again"))
    for group in groups:
        x = torch.tensor([world.rank + 1.0])
        group.allreduce([x]).wait()
        agree(world, x.item() == triangle(world.size))
    groups[-1].shutdown()


def test_overlapping_groups(world, default):
    rings = {}
    for first in range(world.size):
        ranks = sorted({first, (first + 1) % world.size})
        rings[first] = ranks, dist.new_group(ranks)
    for ranks, group in rings.values():
        if world.rank in ranks:
            assert total(world, group) == sum(rank + 1 for rank in ranks)
    agree(world, True)


def test_subgroups_of_equal_size(world, default):
    own, groups = dist.new_subgroups(1)
    agree(world, len(groups) == world.size and total(world, own) == world.rank + 1)
    whole, _ = dist.new_subgroups(world.size)
    agree(world, total(world, whole) == triangle(world.size))
    own, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(world.size)])
    agree(world, total(world, own) == world.rank + 1)


@pytest.mark.mpi(min_size=4)
def test_subgroups_of_two(world, default):
    if world.size % 2:
        pytest.skip("needs an even number of ranks")
    own, groups = dist.new_subgroups(2)
    first = world.rank - world.rank % 2
    agree(world, len(groups) == world.size // 2 and total(world, own) == 2 * first + 3)


def test_names_and_backends(world, default):
    group = dist.group.WORLD
    ok = dist.get_backend(group) == "mpidist" and group.name() == "mpidist"
    ok = (
        ok
        and dist.is_backend_available("mpidist")
        and dist.get_global_rank(group, world.size - 1) == world.size - 1
    )
    config = dist.get_backend_config()
    agree(world, ok and "mpidist" in config, config)
