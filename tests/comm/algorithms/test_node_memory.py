"""Node memory: all-gathers that read where the ranks wrote, lifetime, and plain memory instead."""

import functools
import gc
import os
import random
import signal

import pytest
import torch

from mpidist.comm.algorithms import node_memory, shared_memory
from mpidist.errors import GroupError, MpidistError
from tests.tools.simulated_nodes import SEVERAL, groups
from tests.tools.support import agree, finished, raises_on_all

MPI = pytest.mark.mpi(min_size=2)
NUMEL = node_memory.SMALLEST_BYTES  # elements of a contribution: enough for any dtype


def contribution(rank, numel, dtype, step=0):
    values = torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(rank))
    return (values + rank + 10 * step).to(dtype)


def expected(group, numel, dtype, step=0):
    return torch.cat([contribution(rank, numel, dtype, step) for rank in range(group.size)])


@pytest.fixture
def gathered(monkeypatch):
    """Return the list of results of ``NodeMemory.all_gather`` on this rank."""
    results, true_gather = [], node_memory.NodeMemory.all_gather

    def spy(*args):
        results.append(true_gather(*args))
        return results[-1]

    monkeypatch.setattr(node_memory.NodeMemory, "all_gather", spy)
    return results


def test_ranges_do_not_overlap_and_join_again():
    choose = random.Random(1)
    ranges, taken, free = node_memory.Ranges(200), {}, set(range(200))
    for _ in range(3000):
        if taken and choose.random() < 0.5:
            start = choose.choice(list(taken))
            nbytes = taken.pop(start)
            ranges.give(start, nbytes)
            free |= set(range(start, start + nbytes))
        else:
            nbytes = choose.randint(1, 30)
            start = ranges.take(nbytes)
            fits = [place for place in free if set(range(place, place + nbytes)) <= free]
            assert start == min(fits, default=None)
            if start is not None:
                taken[start] = nbytes
                free -= set(range(start, start + nbytes))
    for start, nbytes in taken.items():
        ranges.give(start, nbytes)
    assert ranges.take(200) == 0
    assert ranges.take(1) is None


@MPI
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64]
)
def test_any_place_of_the_tensors_gives_the_same(group, gathered, dtype):
    """Ranks may differ in which of their tensors lie in node memory, and in whether any does."""
    want = expected(group, NUMEL, dtype)
    mine = contribution(group.rank, NUMEL, dtype)
    for step, (places, is_read) in enumerate(
        [
            (["output in place"], True),
            (["output"], True),
            (["input"], True),
            (["output in place", "input"], True),
            (["neither"], False),
            (["neither", "output"], False),
        ]
    ):
        place = places[(group.rank + step) % len(places)]
        target = (
            group.allocate(NUMEL * group.size, dtype)
            if place.startswith("output")
            else torch.empty(NUMEL * group.size, dtype=dtype)
        )
        source = target.view(group.size, -1)[group.rank]
        if place != "output in place":
            source = group.allocate(NUMEL, dtype) if place == "input" else torch.empty_like(source)
        target.zero_()
        source.copy_(mine)
        finished(group.all_gather_into_tensor(target, source, async_op=step % 2 == group.rank % 2))
        agree(group, torch.equal(target, want) and torch.equal(source, mine), f"{places}")
        agree(group, gathered.pop() is is_read and not gathered, f"{places}")


@MPI
def test_memory_is_reused_at_once_and_no_rank_reads_the_next_values(group, gathered):
    """FSDP2's way: allocate, write the own shard, gather in place, copy out, drop; no pause."""
    wrong, addresses = [], set()
    for step in range(24):
        numel = NUMEL + 1000 * (step % 3)
        output = group.allocate((numel * group.size,), torch.float32)
        addresses.add(output.data_ptr())
        shard = output[group.rank * numel : (group.rank + 1) * numel]
        shard.copy_(contribution(group.rank, numel, torch.float32, step))
        group.all_gather_into_tensor(output, shard)
        if not torch.equal(output, expected(group, numel, torch.float32, step)):
            wrong.append(step)
        output.fill_(-1)
        del output, shard
    agree(group, not wrong, f"{wrong}")
    agree(group, len(addresses) == 1 and gathered == [True] * 24, f"{addresses} {gathered}")


@MPI
def test_a_list_of_pairs_and_tensors_with_gaps(group, gathered):
    sources = [group.allocate(NUMEL, torch.float32) for _ in range(2)]
    targets = [group.allocate(NUMEL * group.size, torch.float32) for _ in range(2)]
    small = [torch.full((3,), float(group.rank)), torch.empty(3 * group.size)]
    for step, source in enumerate(sources):
        source.copy_(contribution(group.rank, NUMEL, torch.float32, step))
    group.all_gather_into_tensor_coalesced([*targets, small[1]], [*sources, small[0]])
    ok = all(
        torch.equal(target, expected(group, NUMEL, torch.float32, step))
        for step, target in enumerate(targets)
    )
    agree(group, ok and gathered == [True, True], f"{gathered}")
    every_second = group.allocate(2 * NUMEL * group.size, torch.float32)[::2]
    group.all_gather_into_tensor(every_second, sources[0])
    agree(group, torch.equal(every_second, targets[0]) and gathered[2:] == [True])


@MPI
def test_a_tensor_is_its_ranks_own_and_takes_its_range_while_a_view_lives(group):
    own = group.allocate((2, 500), torch.float64)
    agree(group, own.shape == (2, 500) and own.dtype is torch.float64 and own.is_contiguous())
    own.fill_(group.rank)
    group.barrier()
    agree(group, bool((own == group.rank).all()), "another rank wrote here")
    address, view = own.data_ptr(), own[1, 10:20]
    del own
    other = group.allocate((2, 500), torch.float64)
    apart = other.data_ptr() != address
    del view
    again = group.allocate((2, 500), torch.float64)
    agree(group, apart and again.data_ptr() == address and other.data_ptr() != address)
    empty, scalar = group.allocate((0, 3), torch.int8), group.allocate((), torch.int8)
    agree(group, empty.shape == (0, 3) and scalar.shape == ())


@MPI
def test_tensors_outlive_their_group_and_leave_no_file_or_mapping(world):
    gc.collect()
    before = _mappings(), len(os.listdir("/proc/self/fd"))
    group = world.clone("short")
    tensor = group.allocate(100_000, torch.float32).fill_(group.rank)
    view = tensor[10:20]
    group.close()
    raises_on_all(world, GroupError, functools.partial(group.allocate, 1, torch.float32), "closed")
    del tensor, group
    gc.collect()
    agree(world, bool((view == world.rank).all()))
    del view
    gc.collect()
    after = _mappings(), len(os.listdir("/proc/self/fd"))
    agree(world, after[0] <= before[0] and after[1] <= before[1], f"{before} {after}")


def _mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:mpidist" in line for line in maps)


@MPI
@pytest.mark.parametrize("short", ["room", "arena"])
def test_a_rank_short_of_memory_warns_once_and_uses_plain_memory(
    group, gathered, monkeypatch, short
):
    """The others keep theirs; gathers with the rank's tensors go by MPI."""
    last = group.rank == group.size - 1
    if short == "arena":
        true = os.sysconf
        pages = {"SC_PHYS_PAGES": 1000 * group.size}
        monkeypatch.setattr(os, "sysconf", lambda name: pages.get(name) or true(name))
    first = group.allocate(100, torch.float32)

    def full(*args):
        raise OSError(28, "No space left on device")

    if short == "room" and last:
        monkeypatch.setattr(node_memory.os, "posix_fallocate", full)
    numel = 1 << 21
    with (
        pytest.warns(RuntimeWarning, match=r"rank \d of \d .*allocate has no memory")
        if (last or short == "arena")
        else _no_warning()
    ):
        large = group.allocate(numel * group.size, torch.float32)
    with _no_warning():
        again = group.allocate(numel * group.size, torch.float32)
    for output in (large, again):
        shard = output.view(group.size, -1)[group.rank]
        shard.copy_(contribution(group.rank, numel, torch.float32))
        group.all_gather_into_tensor(output, shard)
        agree(group, torch.equal(output, expected(group, numel, torch.float32)))
    agree(group, gathered == [False, False], f"{gathered}")
    monkeypatch.undo()
    # What was there before still serves.
    del first
    small = group.allocate(100, torch.float32)
    agree(group, node_memory.of(group._comm).offset(small) >= 0)


class _no_warning:
    def __enter__(self):
        self._caught = pytest.MonkeyPatch()
        self._caught.setattr(node_memory.warnings, "warn", _unexpected)

    def __exit__(self, *error):
        self._caught.undo()


def _unexpected(text, *args, **kwargs):
    raise AssertionError(text)


@MPI
@pytest.mark.parametrize("missing", ["memfd_create", "ftruncate", "open"])
def test_all_ranks_use_plain_memory_where_one_cannot_share(group, gathered, monkeypatch, missing):
    def refuse(*args, **kwargs):
        raise OSError("not here")

    agree(group, group.allocates_node_memory)
    with monkeypatch.context() as patched:
        if group.rank == group.size - 1:
            patched.setattr(shared_memory.os, missing, refuse)
        with pytest.warns(RuntimeWarning, match="cannot map each other's memory"):
            output = group.allocate(NUMEL * group.size, torch.float32)
    agree(group, not group.allocates_node_memory)
    shard = output.view(group.size, -1)[group.rank]
    shard.copy_(contribution(group.rank, NUMEL, torch.float32))
    group.all_gather_into_tensor(output, shard)
    agree(group, torch.equal(output, expected(group, NUMEL, torch.float32)) and not gathered)


@MPI
@pytest.mark.parametrize("layout", SEVERAL)
def test_several_nodes_use_plain_memory_and_gather_by_messages(
    world, monkeypatch, gathered, layout
):
    with groups(world, monkeypatch) as clone:
        group = clone(layout)
        if group.is_single_node:
            pytest.skip("two ranks that this layout puts on one node")
        target = group.allocate((group.size, NUMEL), torch.float32)
        target[group.rank] = group.rank
        facts = [not group.allocates_node_memory, node_memory.of(group._comm) is None]
        group.all_gather_into_tensor(target, target[group.rank])
        facts += [bool((target[rank] == rank).all()) for rank in range(group.size)]
        agree(world, all(facts) and not gathered, f"{facts}")


@pytest.mark.mpi(min_size=1)
def test_a_rank_alone_uses_plain_memory(world):
    own = world.new_group([world.rank], f"alone {world.rank}")
    tensor = own.allocate(3, torch.int32)
    agree(world, tensor.shape == (3,) and not own.allocates_node_memory)
    own.close()


@MPI
def test_wrong_arguments_are_refused_before_any_rank_waits(group):
    for shape, dtype, error in (
        (-1, torch.float32, ValueError),
        ((3, -2), torch.float32, ValueError),
        (1.5, torch.float32, TypeError),
        ("3", torch.float32, TypeError),
        (True, torch.float32, TypeError),
        (3, "float32", TypeError),
    ):
        raises_on_all(group, error, functools.partial(group.allocate, shape, dtype), "allocate")
    agree(group, node_memory.of(group._comm) is None)


@MPI
def test_contributions_of_unequal_length_are_an_error_and_never_read(world, monkeypatch):
    """As without node memory: MPI's own error, on the ranks that can know."""
    group = world.clone("unequal", on_timeout="raise")
    numel = NUMEL * (2 if group.rank == 0 else 1)
    output = group.allocate(numel * group.size, torch.float32).fill_(7)
    memory, comm = node_memory.of(group._comm), group._comm
    shard = output.view(group.size, -1)[group.rank]
    agree(world, not memory.all_gather(comm, shard, output) and bool((output == 7).all()))
    group.close()


@MPI
def test_default_device_inference_mode_and_debug_mode(world, monkeypatch):
    monkeypatch.setenv("MPIDIST_DEBUG", "1")
    group = world.clone("modes", on_timeout="raise")
    with torch.device("meta"), torch.inference_mode():
        output = group.allocate(NUMEL * group.size, torch.float32)
    agree(world, output.device.type == "cpu" and not output.is_inference())
    shard = output.view(group.size, -1)[group.rank]
    shard.copy_(contribution(group.rank, NUMEL, torch.float32))
    with torch.device("meta"), torch.inference_mode():
        finished(group.all_gather_into_tensor(output, shard, async_op=group.rank == 0))
    agree(world, torch.equal(output, expected(group, NUMEL, torch.float32)))
    leaf = group.allocate(NUMEL * group.size, torch.float32).requires_grad_()
    with torch.inference_mode():
        source = contribution(group.rank, NUMEL, torch.float32)
    group.all_gather_into_tensor(leaf.detach(), source)
    agree(world, torch.equal(leaf.detach(), output))
    group.close()


@MPI
def test_a_forked_child_may_read_and_drop_tensors_and_not_allocate(group):
    tensor = group.allocate(1000, torch.float32).fill_(3)
    address = tensor.data_ptr()
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            is_read = tensor.tolist() == [3.0] * 1000
            del tensor
            gc.collect()
            try:
                group.allocate(1000, torch.float32)
            except MpidistError as error:
                ended = int(not (is_read and "forked" in str(error)))
        finally:
            os._exit(ended)
    signal.alarm(60)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    other = group.allocate(1000, torch.float32)
    agree(group, status == 0 and other.data_ptr() != address and bool((tensor == 3).all()))


@MPI
def test_memory_of_one_group_in_calls_of_another(group, world):
    """The other group finds it in no arena of its own, and MPI takes it like any memory."""
    output = group.allocate(NUMEL * group.size, torch.float32)
    other = world.clone("other")
    other.allocate(1, torch.float32)
    shard = output.view(group.size, -1)[group.rank]
    shard.copy_(contribution(group.rank, NUMEL, torch.float32))
    other.all_gather_into_tensor(output, shard)
    agree(world, torch.equal(output, expected(group, NUMEL, torch.float32)))
    total = group.allocate(NUMEL, torch.float32).fill_(1)
    group.all_reduce(total)
    agree(world, bool((total == group.size).all()))
    other.close()
