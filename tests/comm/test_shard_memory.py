"""Shard memory: on one node, on several, in one copy for each node, and without shared memory."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from mpidist.comm import shard_memory
from mpidist.errors import GroupError
from tests.tools.simulated_nodes import LAYOUTS, groups
from tests.tools.support import agree, finished, raises_on_all

pytestmark = pytest.mark.mpi

NBYTES = 5000


@pytest.fixture
def on_nodes(world, monkeypatch):
    """Return a function that makes groups with simulated nodes."""
    with groups(world, monkeypatch) as clone:
        yield clone


def ranges_of(size, seed):
    """Return two parts for each rank, some of them empty, which together are all bytes."""
    generator = torch.Generator().manual_seed(seed)
    bounds = [
        0,
        *sorted(torch.randint(0, NBYTES, (2 * size - 1,), generator=generator).tolist()),
        NBYTES,
    ]
    parts = [(bounds[place], bounds[place + 1]) for place in range(2 * size)]
    return [[parts[rank], parts[size + rank]] for rank in range(size)]


def expected(ranges, seed):
    values = torch.zeros(NBYTES, dtype=torch.uint8)
    for rank, parts in enumerate(ranges):
        for first, end in parts:
            values[first:end] = (torch.arange(first, end) * (rank + 3) + seed).to(torch.uint8)
    return values


def stages(group, memory, ranges):
    """Return a function that gathers what all ranks have written before its call."""

    def run():
        group.barrier()
        memory.prepare(ranges)()

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("one_copy", [False, True], ids=["copies", "one copy"])
@pytest.mark.parametrize("shares", [True, False], ids=["memory", "messages"])
def test_all_ranks_get_all_parts(world, on_nodes, monkeypatch, layout, one_copy, shares):
    """Gathers without a pause: a rank ahead of the others could overwrite a part that they read."""
    if not shares:
        monkeypatch.setattr(shard_memory, "shared_maps", lambda comm, sizes: None)
    group = on_nodes(layout)
    memory = shard_memory.allocate(group, NBYTES, one_copy)
    is_shared = shares and group.size > 1 and (group.is_single_node or group._comm.shares_nodes)
    agree(world, memory.is_one_copy == (one_copy and is_shared) and not memory.own.any())
    nodes = group._comm.nodes
    agree(world, memory.leads == (nodes.index(nodes[group.rank]) == group.rank))
    wrong = []
    for step in range(24):
        ranges = ranges_of(group.size, step)
        whole = expected(ranges, step)
        for first, end in ranges[group.rank]:
            memory.own[first:end] = whole[first:end]
        finished(group.in_order(stages(group, memory, ranges), async_op=step % 3 == 1))
        if not torch.equal(memory.own, whole):
            wrong.append(step)
        if memory.is_one_copy:
            # Other ranks read the one copy, which this rank writes next.
            group.barrier()
    agree(world, not wrong, str(wrong))


@pytest.mark.parametrize("one_copy", [False, True], ids=["copies", "one copy"])
@pytest.mark.parametrize("layout", ["one node", "uneven"])
def test_where_one_rank_cannot_share_all_send_messages(
    world, on_nodes, monkeypatch, layout, one_copy
):
    """A node of one rank needs no shared memory, and must still choose as the others do."""
    group = on_nodes(layout)
    true_maps = shard_memory.shared_maps
    alone = layout == "uneven"

    def refused(comm, sizes):
        made = true_maps(comm, sizes)
        return None if group.rank == 0 or not alone else made

    monkeypatch.setattr(shard_memory, "shared_maps", refused)
    memory = shard_memory.allocate(group, NBYTES, one_copy)
    agree(world, memory._copies is None and not memory.is_one_copy)
    ranges = ranges_of(group.size, 1)
    memory.own.copy_(expected(ranges, 1) * torch.tensor(0, dtype=torch.uint8))
    for first, end in ranges[group.rank]:
        memory.own[first:end] = expected(ranges, 1)[first:end]
    stages(group, memory, ranges)()
    agree(world, torch.equal(memory.own, expected(ranges, 1)))


def test_memory_is_the_hosts_whatever_default_device_dtype_and_mode(world, on_nodes):
    """The user may set a default device, a default dtype and inference mode."""
    group = on_nodes("blocks")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            memories = [
                shard_memory.allocate(group, NBYTES, one_copy) for one_copy in (False, True)
            ]
            memories.append(shard_memory.on_device(group, NBYTES, torch.device("cpu")))
        for memory in memories:
            agree(world, memory.own.device.type == "cpu" and not memory.own.is_inference())
            ranges = ranges_of(group.size, 2)
            for first, end in ranges[group.rank]:
                memory.own[first:end] = expected(ranges, 2)[first:end]
            with torch.device("meta"), torch.inference_mode():
                stages(group, memory, ranges)()
            agree(world, torch.equal(memory.own, expected(ranges, 2)))
            group.barrier()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("layout", ["one node", "cyclic"])
def test_parts_are_gathered_in_debug_mode_and_where_timeouts_raise(
    world, on_nodes, monkeypatch, layout
):
    monkeypatch.setenv("MPIDIST_DEBUG", "1")
    group = on_nodes(layout, on_timeout="raise")
    for one_copy in (False, True):
        memory = shard_memory.allocate(group, NBYTES, one_copy)
        ranges = ranges_of(group.size, 3)
        for first, end in ranges[group.rank]:
            memory.own[first:end] = expected(ranges, 3)[first:end]
        # A synchronous call on one rank matches an asynchronous one on another.
        finished(group.in_order(stages(group, memory, ranges), async_op=group.rank == 0))
        agree(world, torch.equal(memory.own, expected(ranges, 3)))


def test_memory_outlives_its_group_and_leaves_no_file_or_mapping(world, on_nodes):
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), _shared_mappings()
    group = on_nodes("one node")
    memories = [shard_memory.allocate(group, 1 << 20, one_copy) for one_copy in (False, True)]
    memories[0].own.fill_(group.rank + 1)
    view = memories[0].own[10:20]
    gather = memories[0].prepare([[]] * world.size)
    group.close()
    raises_on_all(world, GroupError, gather, "closed")
    del memories, gather, group
    gc.collect()
    agree(world, bool((view == world.rank + 1).all()))
    del view
    gc.collect()
    after = len(os.listdir("/proc/self/fd")), _shared_mappings()
    agree(world, after[0] <= before[0] and after[1] <= before[1], f"{before} {after}")


def _shared_mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:mpidist" in line for line in maps)
