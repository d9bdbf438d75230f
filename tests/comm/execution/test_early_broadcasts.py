"""Broadcasts that begin before their turn: messages, order, callbacks, failures."""

import time
import weakref

import pytest
import torch

from mpidist.comm.algorithms import tree_broadcast
from mpidist.comm.mpi.tags import BROADCAST_TAGS, Tag
from mpidist.comm.world_group import from_world
from mpidist.errors import CommTimeout
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)

_NUMEL = 300_000


@pytest.fixture
def on_nodes(world, monkeypatch):
    """Return a function that makes groups on a layout's nodes."""
    with groups(world, monkeypatch) as clone:
        yield clone


def issued(group, roots, async_op=True):
    """Issue broadcasts from these roots; return tensors and works."""
    tensors = [
        torch.full((_NUMEL + place,), place + 0.5 if group.rank == root else -1.0)
        for place, root in enumerate(roots)
    ]
    works = [
        group.broadcast(tensor, root, async_op=async_op)
        for tensor, root in zip(tensors, roots, strict=True)
    ]
    return tensors, works


def are_right(tensors):
    return all(bool((tensor == place + 0.5).all()) for place, tensor in enumerate(tensors))


def soon(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return condition()


def test_a_broadcast_begins_while_the_one_before_it_waits_for_its_root(world, on_nodes):
    group, last = on_nodes("alone"), world.size - 1
    comm = group._comm
    number = comm.kept.get("broadcasts", 0)
    roots, facts = [0, last, last], ""
    if group.rank == 0:
        tag = comm.own_tag(Tag.BROADCAST) + (number + 3) % BROADCAST_TAGS
        # The last rank has sent the third, and this rank not even the first.
        begun = soon(lambda: comm.plain.Iprobe(last, tag))
        tensors, _ = issued(group, roots, async_op=False)
    else:
        tensors, works = issued(group, roots)
        # Where nobody helps, the group's thread has started all that it can.
        begun = soon(lambda: comm.kept.get("broadcasts", 0) == number + 3)
        journal = group.journal
        facts = f"{journal.sequence} {[work.is_completed() for work in works]}"
        # All of them wait for the first, which alone is under way for reports.
        begun = begun and journal.sequence <= 1 + sum(work.is_completed() for work in works)
        for work in works:
            work.wait()
        begun = begun and group.journal.sequence == 3
    agree(world, begun and are_right(tensors), facts)


def test_broadcasts_end_in_their_order(world, on_nodes):
    group, ended = on_nodes("alone"), []
    roots = [(place * 2) % world.size for place in range(12)]
    tensors, works = issued(group, roots)
    for place, work in enumerate(works):
        work.get_future().add_done_callback(lambda _, place=place: ended.append(place))
    works[-1].wait()
    agree(world, soon(lambda: len(ended) == 12) and ended == sorted(ended), str(ended))
    agree(world, are_right(tensors))


def test_more_broadcasts_than_tags(world, on_nodes):
    group = on_nodes("blocks")
    tensors = [torch.full((5000,), float(group.rank)) for _ in range(2 * BROADCAST_TAGS + 9)]
    works = [
        group.broadcast(tensor, place % world.size, async_op=True)
        for place, tensor in enumerate(tensors)
    ]
    works[-1].wait()
    right = [bool((t == place % world.size).all()) for place, t in enumerate(tensors)]
    agree(world, all(right), str(right.count(False)))


def test_a_callbacks_broadcast_comes_before_what_is_queued_behind(world, on_nodes):
    group, last = on_nodes("alone"), world.size - 1
    for turn in range(4):
        (first, between), behind = (torch.full((3000,), float(group.rank)) for _ in range(2)), []
        if (group.rank + turn) % 2:
            for tensor, root in ((first, 0), (between, last)):
                group.broadcast(tensor, root)
            behind, works = issued(group, [last, 0, last])
        else:
            work = group.broadcast(first, 0, async_op=True)
            chained = work.get_future().then(
                lambda _, between=between: group.broadcast(between, last, async_op=True).wait()
            )
            behind, works = issued(group, [last, 0, last])
            chained.wait()
        for work in works:
            work.wait()
        right = bool((first == 0).all()) and bool((between == last).all()) and are_right(behind)
        agree(world, right, f"turn {turn}")


def test_broadcasts_among_other_operations(world, on_nodes):
    group, last = on_nodes("cyclic" if world.size > 2 else "alone"), world.size - 1

    def inner():
        group.broadcast(nested[0], 0)
        group.broadcast(nested[1], last)

    for turn in range(3):
        total, nested = torch.ones(10), [torch.full((9000,), float(group.rank)) for _ in range(2)]
        before, works = issued(group, [0, last, 0])
        works.append(group.all_reduce(total, async_op=True))
        strided = torch.full((50, 40), float(group.rank)).t()
        works.append(group.broadcast(strided, last, async_op=True))
        works.append(group.in_order(inner, async_op=True))
        behind, more = issued(group, [last, 0])
        for work in (works + more)[:: 1 if turn else -1]:
            work.wait()
        right = are_right(before) and are_right(behind) and bool((total == world.size).all())
        right = right and bool((nested[0] == 0).all()) and bool((nested[1] == last).all())
        agree(world, right and bool((strided == last).all()), f"turn {turn}")


def test_nothing_refers_to_the_tensors_behind_the_wait(world, on_nodes):
    group = on_nodes("alone")
    tensors, works = issued(group, [0, world.size - 1, 0])
    for work in works:
        work.wait()
    held = [weakref.ref(tensor) for tensor in tensors]
    del tensors, works, work
    # The group's thread drops its references after it has completed the last.
    agree(world, soon(lambda: not any(ref() is not None for ref in held)))


def test_a_timeout_raises_from_all_that_were_started(world, on_nodes):
    group, last = on_nodes("alone", on_timeout="raise"), world.size - 1
    group.timeout_s = 0.3
    errors = []
    if group.rank != last:
        _, works = issued(group, [last, 0, 0])
        for work in works:
            try:
                work.wait()
            except CommTimeout as error:
                errors.append(str(error))
    failed = soon(lambda: group._state.failure is not None)
    fine = group.rank == last or len(errors) == 3
    agree(world, failed and fine and all("past its timeout" in e for e in errors), str(errors))


def test_a_group_is_closed_behind_its_broadcasts(world, on_nodes):
    group = on_nodes("alone")
    tensors, _ = issued(group, [0, world.size - 1, 0])
    group.close()
    agree(world, are_right(tensors))


def test_debug_mode_starts_none_early(world, on_nodes):
    on_nodes("alone")
    group = from_world("strict", 1800.0, debug=True)
    assert group._execution._early is None and tree_broadcast.applies(group._comm)
    tensors, works = issued(group, [0, world.size - 1])
    for work in works:
        work.wait()
    agree(world, are_right(tensors))
    group.close()
