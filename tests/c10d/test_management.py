"""Timeouts, splitting and names of a group, by torch's functions."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpidist import torch_version
from mpidist.c10d import generation
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group")]


def test_torchs_timeout_is_the_native_groups(world, default_group):
    before = default_group.native.timeout_s
    distributed_c10d._set_pg_timeout(timedelta(seconds=77))
    seen = default_group.native.timeout_s
    distributed_c10d._set_pg_timeout(timedelta(seconds=before), default_group)
    agree(world, (seen, default_group.native.timeout_s) == (77, before), f"{seen}")


def test_the_sequence_number_counts_the_collectives_of_a_group(world, default_group):
    group, x = dist.new_group(), torch.ones(2)
    backend = group._get_backend(torch.device("cpu"))
    first = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(x, group=group)
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(2)]
    seen = [one._get_sequence_number_for_group() - first for one in (group, backend)]
    for work in works:
        work.wait()
    agree(world, seen == [5, 5], f"{seen}")
    dist.destroy_process_group(group)


def test_copies_of_a_layer_are_on_its_group(world, default_group):
    for group in (world, default_group):
        layer = torch.nn.Linear(2, 2)
        layer.group = group
        for copied in (copy.deepcopy(layer), copy.copy(layer)):
            agree(world, copied.group is group)
        agree(world, copy.copy(group) is group)


def test_a_split_group_has_the_given_ranks_names_and_timeout(world, default_group):
    """Only the method, because torch.distributed.split_group requires an accelerator."""
    evens = list(range(0, world.size, 2))[::-1]
    made = default_group.split_group(
        evens, timedelta(seconds=70), group_name="evens", group_desc="of every second rank"
    )
    if not generation.HAS_BACKENDS:
        evens.sort()  # as torch does before 2.14
    if world.rank in evens:
        x = torch.ones(1)
        made.allreduce([x]).wait()
        seen = (
            made.rank(),
            made.size(),
            made.group_name,
            made.group_desc,
            made.native.timeout_s,
            x.item(),
        )
        expected = (
            evens.index(world.rank),
            len(evens),
            "evens",
            "of every second rank",
            70,
            len(evens),
        )
        made.get_group_store().set("here", str(made.rank()))
        made.shutdown()
    else:
        seen, expected = made, None
    agree(world, seen == expected, f"{seen}, not {expected}")


@pytest.mark.skipif(
    torch_version.numbers(torch.__version__) < (2, 15),
    reason="torch splits on the CPU from 2.15 on",
)
def test_a_split_group_keeps_the_order_of_its_ranks(world, default_group):
    ranks = list(range(world.size))[::-1]
    made = dist.split_group(default_group, [ranks])
    x = torch.tensor([float(world.rank)])
    dist.broadcast(x, world.size - 1, group=made)
    seen = (dist.get_process_group_ranks(made), dist.get_rank(made), made.rank(), x.item())
    own = ranks.index(world.rank)
    agree(world, seen == (ranks, own, own, world.size - 1.0), str(seen))
    dist.destroy_process_group(made)


def test_torchs_split_and_meshes_where_there_is_an_accelerator(world, default_group, monkeypatch):
    """On a simulated CUDA machine, the default group is bound to a device and split for meshes."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda")
    )
    default_group.bound_device_id = torch.device("cuda", 0)
    try:
        half = [list(range(world.size))[: world.size // 2 or 1]]
        made = dist.split_group(default_group, half)
        new = dist.new_group(half[0])
        x, y = torch.ones(1), torch.ones(1)
        mesh = dist.init_device_mesh("cpu", (1, world.size), mesh_dim_names=("one", "all"))
        dist.all_reduce(x, group=mesh["all"].get_group())
        inside = world.rank in half[0]
        if inside:
            dist.all_reduce(y, group=made)
            dist.destroy_process_group(made)
            dist.destroy_process_group(new)
        ok = (
            x.item() == world.size
            # torch 2.14 returns NON_GROUP_MEMBER, older versions None.
            and (made not in (None, dist.GroupMember.NON_GROUP_MEMBER)) == inside
            and y.item() == (len(half[0]) if inside else 1)
        )
        agree(world, ok, f"{x}, {y}, {made}")
    finally:
        default_group.bound_device_id = None


def test_a_merge_with_remote_ranks_is_refused(world, default_group):
    store = default_group.get_group_store()
    raises_on_all(
        world,
        NotImplementedError,
        lambda: default_group.merge_remote_group(store, 8),
        "start all ranks in one job",
    )


def test_an_exception_in_torchs_manager_leaves_no_works_behind(world, default_group):
    group = dist.group.WORLD
    with (
        pytest.raises(KeyError, match="of the program"),
        distributed_c10d._coalescing_manager(device=torch.device("cpu")),
    ):
        raise KeyError("of the program")
    distributed_c10d._world.pg_coalesce_state.pop(group, None)
    try:
        for _ in range(100):
            tensor = torch.ones(1000)
            dist.all_reduce(tensor)
        kept = len(group.calls._batch)
    finally:
        group.calls.end_batch().wait()
    agree(world, kept <= 1 and bool(tensor.eq(world.size).all()), f"{kept}")
