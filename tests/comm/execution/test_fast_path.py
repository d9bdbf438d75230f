"""Fast path of synchronous collectives: calls prepared for the memory of their tensors."""

import threading
from functools import partial

import pytest
import torch

from mpidist.comm import collectives
from mpidist.comm.algorithms.reduce_op import (
    MAX,
    SUM,
)
from mpidist.comm.mpi import nonblocking
from mpidist.errors import MpidistError
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [3, 5_000, 200_000])
def test_the_fast_path_writes_below_autograd(group, dtype, numel):
    leaf = torch.ones(numel, dtype=dtype, requires_grad=True)
    group.all_reduce(leaf.detach())  # prepares the fast path
    outcome = group.all_reduce_at_once(leaf, SUM)
    value = float(group.size**2) if outcome else float(group.size)
    agree(
        group,
        leaf.is_leaf and leaf.grad_fn is None and bool((leaf == value).all()),
        f"{outcome} {leaf}",
    )


def test_the_fast_path_notices_reused_memory(group):
    whole = torch.ones(8)
    for view, op, expected in [
        (whole[:4], SUM, group.size),
        (whole[:2], SUM, group.size**2),
        (whole[:2].view(torch.int32), MAX, None),
        (whole[:4], MAX, None),
        (whole[:4].view(2, 2).t(), SUM, None),
    ]:
        before = view.clone()
        group.all_reduce(view, op)
        wanted = (
            torch.full_like(before, expected)
            if expected
            else before * group.size
            if op == SUM
            else before
        )
        agree(group, torch.equal(view, wanted), f"{view} {wanted}")


def calls(group, numel):
    """Yield (name, call, its tensors that are read, those that are written) of each collective."""
    size, is_first = group.size, group.rank == 0

    def many():
        return [torch.empty(numel) for _ in range(size)]

    one, whole, part = torch.empty(numel), torch.empty(size * numel), torch.empty(numel)
    parts, others = many(), many()
    root = size - 1
    yield "broadcast", partial(group.broadcast, one, root), [one], [one]
    yield "broadcast_coalesced", partial(group.broadcast_coalesced, parts, 0), parts, parts
    yield "all_gather", partial(group.all_gather, parts, one), [one], parts
    chunks = list(whole.split(numel))
    yield "all_gather into chunks", partial(group.all_gather, chunks, one), [one], chunks
    own = partial(group.all_gather, chunks, chunks[group.rank])
    yield "all_gather in place", own, [chunks[group.rank]], chunks
    into = partial(group.all_gather_into_tensor, whole, one)
    yield "all_gather_into_tensor", into, [one], [whole]
    halves = [torch.empty(size * numel), torch.empty(size)], [torch.empty(numel), torch.empty(1)]
    pairs = partial(group.all_gather_into_tensor_coalesced, *halves)
    yield "all_gather_into_tensor_coalesced", pairs, halves[1], halves[0]
    scattered = partial(group.reduce_scatter_tensor_coalesced, *reversed(halves))
    yield "reduce_scatter_tensor_coalesced", scattered, halves[0], halves[1]
    gather = partial(group.gather, one, parts if is_first else None, 0)
    yield "gather", gather, [one], parts if is_first else []
    scatter = partial(group.scatter, one, parts if is_first else None, 0)
    yield "scatter", scatter, parts if is_first else [], [one]
    yield "all_to_all", partial(group.all_to_all, others, parts), parts, others
    exchanged = torch.empty(size * numel)
    splits = [numel] * size
    single = partial(group.all_to_all_single, exchanged, whole, splits, splits)
    yield "all_to_all_single", single, [whole], [exchanged]
    yield "all_reduce_coalesced", partial(group.all_reduce_coalesced, parts, MAX), parts, parts
    yield "reduce", partial(group.reduce, one, 0), [one], [one] if is_first else []
    yield "reduce_scatter", partial(group.reduce_scatter, part, parts), parts, [part]
    flat = partial(group.reduce_scatter_tensor, part, whole)
    yield "reduce_scatter_tensor", flat, [whole], [part]


@pytest.mark.parametrize("numel", [3, 20_000])
def test_every_prepared_collective_gives_what_the_executor_gives(group, numel, monkeypatch):
    wrong = []
    for name, call, read, written in calls(group, numel):
        for turn in range(3):  # the same memory, with other values
            outcomes = []
            for is_prepared in (False, True):
                values = torch.Generator().manual_seed(100 * turn + group.rank)
                for tensor in (*written, *read):
                    tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=values).float())
                with monkeypatch.context() as patch:
                    if not is_prepared:
                        patch.setattr(group, "_at_once", lambda *args: False)
                    call()
                outcomes.append([tensor.clone() for tensor in written])
            if not all(map(torch.equal, *outcomes)):
                wrong.append((name, turn))
    agree(group, not wrong, str(wrong))


def test_a_prepared_call_is_not_taken_for_another(group):
    t = torch.full((4,), float(group.rank))
    group.broadcast(t, 0)
    with pytest.raises(TypeError, match=r"src to be a rank"):
        group.broadcast(t, False)
    group.broadcast(t.view(2, 2), 0)
    group.broadcast(t.view(torch.int32), group.size - 1)
    agree(group, t.tolist() == [0.0] * 4, str(t))


def test_prepared_calls_write_inference_tensors_and_refuse_leaves(group):
    with torch.inference_mode():
        made = torch.full((3,), float(group.rank + 1))
        total = made.clone()
        group.reduce_scatter_tensor(total[:1], total.repeat(group.size)[: group.size])
    expected = group.size * (group.size + 1) / 2
    source = torch.full((group.size,), float(group.rank + 1))
    group.reduce_scatter_tensor(total[1:2], source)
    group.broadcast(made, 0)
    leaf = torch.ones(3, requires_grad=True)
    group.broadcast(leaf.detach(), 0)
    if group.rank:
        with pytest.raises(ValueError, match="requires grad"):
            group.broadcast(leaf, 0)
        with torch.no_grad():
            group.broadcast(leaf, 0)
    else:
        group.broadcast(leaf, 0)
    agree(group, total.tolist()[:2] == [expected] * 2 and made.tolist() == [1.0] * 3, str(total))


def test_a_prepared_operation_is_numbered_and_leaves_its_error(group):
    outcomes = [None, ValueError("wrong"), None]

    def execute():
        if outcomes[-1] is not None:
            raise outcomes[-1]

    at_once, first = group.prepared("own", execute), group.journal.sequence
    taken = at_once()
    outcomes.pop()
    with pytest.raises(ValueError, match="wrong"):
        at_once()
    agree(group, taken and group.journal.sequence == first + 2 and group.journal.operation == "own")
    outcomes.pop()
    group.barrier()
    queued = group.all_reduce(torch.ones(200_000), async_op=True)
    at_once()  # whether it finds the queue empty is the other thread's
    queued.wait()
    agree(group, at_once())


def test_a_prepared_operation_is_left_to_a_queue_and_a_closed_group(world):
    group = world.new_group(range(world.size))
    at_once = group.prepared("own", lambda: None)
    held = threading.Event()
    work = group.in_order(lambda: held.wait(10) and None, async_op=True)
    behind = group.in_order(lambda: None, async_op=True)
    is_left = not at_once()
    held.set()
    for each in (work, behind):
        each.wait()
    group.barrier()
    taken = at_once()
    group.close()
    agree(world, is_left and taken and not at_once())


def test_a_list_of_many_tensors_is_not_kept(group):
    held = len(group._fast_path._movements)
    tensors = [torch.full((1,), float(group.rank)) for _ in range(100)]
    group.broadcast_coalesced(tensors, group.size - 1)
    right = all(tensor.item() == group.size - 1 for tensor in tensors)
    agree(group, right and len(group._fast_path._movements) == held, str(tensors[:2]))


def test_memory_is_prepared_for_when_it_comes_again(group):
    path = group._fast_path
    tensors = [torch.full((2,), float(group.rank)) for _ in range(5)]
    held = len(path._movements)
    for tensor in tensors:
        group.broadcast(tensor, 0)
    first = len(path._movements) - held
    for tensor in tensors:
        group.broadcast(tensor, group.size - 1)
        group.broadcast(tensor, group.size - 1)
    right = all(tensor.tolist() == [0.0] * 2 for tensor in tensors)
    again = len(path._movements) - held
    agree(group, right and first == 0 and again == 5, f"{tensors} {first} {again}")


def test_views_of_one_memory_that_take_turns_are_prepared_once(group, monkeypatch):
    whole, prepared = torch.ones(4), []
    views = [whole, whole.view(2, 2), whole[:2], whole.view(torch.int32)]
    recorded = group._fast_path._recorded
    monkeypatch.setattr(
        group._fast_path, "_recorded", lambda *args: prepared.append(args) or recorded(*args)
    )
    for _ in range(3):
        for view in views:
            group.all_reduce(view, MAX)
    agree(group, len(prepared) == len(views) and whole.tolist() == [1.0] * 4, str(prepared))


def test_split_sizes_that_are_no_list_are_not_taken_for_some(group):
    size, rows = group.size, 2 * group.size
    sends = [rows if group.rank == 0 else 0] * size
    receives = [rows] + [0] * (size - 1)
    source, target = torch.arange(sum(sends)), torch.zeros(rows, dtype=torch.int64)
    for _ in range(3):
        group.all_to_all_single(target, source, receives, sends)
    # The same numbers in the same order, were a list known by its length and its items.
    with pytest.raises((TypeError, ValueError)):
        group.all_to_all_single(target, source, size, [*receives[1:], size, *sends])
    first = rows * group.rank
    agree(group, target.tolist() == list(range(first, first + rows)), str(target))


def test_a_call_that_is_left_keeps_its_tensors(world, monkeypatch):
    """MPI may go on to read and to write them."""
    group, kept = world.clone("left", on_timeout="raise"), []
    monkeypatch.setattr(nonblocking, "_abandoned", kept)
    monkeypatch.setattr("mpidist.comm.mpi.runtime.note_failure", lambda *args: None)
    source, target = torch.ones(2), torch.zeros(2 * group.size)
    for _ in range(2):
        group.all_gather_into_tensor(target, source)
    (call,) = group._fast_path._movements.values()

    def fail() -> None:
        group._state.fail(MpidistError("left"))
        raise MpidistError("left")

    run = group._fast_path._recorded("broadcast", fail, ("broadcast", (), ()))
    group._fast_path._movements = {
        key: type(call)(run, False, call.inputs, call.outputs, call.shown)
        for key in group._fast_path._movements
    }
    with pytest.raises(MpidistError, match="left"):
        group.all_gather_into_tensor(target, source)
    ((_, (_, (_, _, tensors, _))),) = kept
    found = {id(tensor) for tensor in tensors}
    group.close()
    agree(world, {id(source), id(target)} <= found)


def test_a_path_that_was_closed_finds_nothing(world):
    """Also where another thread has prepared a call meanwhile."""
    group, tensor = world.clone("closed path"), torch.ones(2)
    group.all_reduce(tensor)
    path = group._fast_path
    found, calls = path.find(tensor, SUM), dict(path._calls)
    path.close()
    path._calls.update(calls)
    agree(world, found is not None and path.find(tensor, SUM) is None)
    group.close()


def test_the_groups_thread_prepares_nothing_between_nodes(world, monkeypatch):
    with groups(world, monkeypatch) as clone:
        group, tensor = clone("alone"), torch.ones(2)
        for _ in range(2):
            group.barrier()
            group.all_reduce(tensor)
        with monkeypatch.context() as patch:
            # It would wait by polling where the group's thread sleeps.
            patch.setattr(group._progress, "_thread_id", threading.get_ident())
            in_thread = (
                group._at_once(collectives.barrier, ()),
                group.all_reduce_at_once(tensor, SUM),
            )
        elsewhere = group._at_once(collectives.barrier, ())
        # On one node and one rank there are no waits between nodes.
        is_far = world.size > 1
        agree(world, elsewhere and in_thread == ((False, False) if is_far else (True, True)))
