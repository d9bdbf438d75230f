"""Queued broadcasts between nodes, which begin before their turn: order, callbacks, failures."""

import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.algorithms import broadcasts
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.world_group import from_world
from mpidist.errors import CommTimeout
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree, finished

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
    group.broadcast(torch.zeros(1), 0)
    roots, facts = [0, last, last], ""
    if group.rank == 0:
        # All others have begun the third, and this rank not even the first.
        begun = all(world.recv_object(peer) for peer in range(1, world.size))
        tensors, _ = issued(group, roots, async_op=False)
    else:
        tensors, works = issued(group, roots)
        # Where nobody helps, the group's thread has begun all that it can.
        begun = soon(lambda: len(group._comm.kept["broadcasts"].begun) == 3)
        journal = group.journal
        facts = f"{journal.sequence} {[work.is_completed() for work in works]}"
        # All of them wait for the first, which alone is under way for reports.
        begun = begun and journal.sequence == 2 and not works[0].is_completed()
        world.send_object(begun, 0)
        for work in works:
            work.wait()
        begun = begun and group.journal.sequence == 4
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


@pytest.mark.parametrize("numel", [1, 5000])
def test_many_broadcasts(world, on_nodes, numel):
    group = on_nodes("blocks")
    tensors = [torch.full((numel,), float(group.rank)) for _ in range(500)]
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


@pytest.mark.parametrize("async_op", [True, False])
def test_nothing_refers_to_the_tensors_behind_the_wait(world, on_nodes, async_op):
    group = on_nodes("alone")
    tensors, works = issued(group, [0, world.size - 1, 0], async_op)
    while works:
        finished(works.pop())
    held = [weakref.ref(tensor) for tensor in tensors]
    del tensors
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


class Left(BaseException):
    """As KeyboardInterrupt, which a signal raises in a wait."""


@pytest.fixture
def leaves(monkeypatch):
    """Return a function that has an exception leave the next wait for broadcasts on this rank."""
    real = Communicator.wait_all

    def leave(after=0):
        waits = iter(range(after + 1))

        def wait_all(self, requests):
            if next(waits, None) == after:
                raise Left
            real(self, requests)

        monkeypatch.setattr(Communicator, "wait_all", wait_all)

    return leave


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("lengths", [(3, 3, 3), (_NUMEL,) * 3, (_NUMEL, 2 * _NUMEL, _NUMEL)])
@pytest.mark.parametrize("again", [True, False])
def test_a_wait_that_an_exception_leaves_keeps_the_place_in_the_order(
    world, on_nodes, leaves, first, lengths, again
):
    """Also of a group's first, which makes a communicator; and into the same memory again."""
    group, last = on_nodes("alone"), world.size - 1
    if not first:
        group.broadcast(torch.zeros(1), 0)
    tensors = [
        torch.full((numel,), place + 1.0 if group.rank == 0 else -1.0)
        for place, numel in enumerate(lengths)
    ]
    if group.rank == last:
        leaves()
        with pytest.raises(Left):
            group.broadcast(tensors[0], 0)
        if again and lengths[2] == lengths[0]:
            tensors[2] = tensors[0]
    for tensor in tensors[group.rank == last :]:
        group.broadcast(tensor, 0)
    behind = [bool((tensor == place + 1).all()) for place, tensor in enumerate(tensors)][1:]
    agree(world, all(behind), str(behind))
    total = torch.ones(4)
    group.all_reduce(total)
    agree(world, bool((total == world.size).all()))
    del tensors, tensor
    group.broadcast(torch.zeros(1), 0)
    agree(world, not broadcasts._not_ended, f"{len(broadcasts._not_ended)} are kept")


def test_broadcasts_queued_behind_one_that_was_left_keep_their_order(world, on_nodes, leaves):
    """Into its memory, too: while it is waited for, none is in its turn."""
    group, last = on_nodes("alone"), world.size - 1
    group.broadcast(torch.zeros(1), 0)
    into = [torch.zeros(4) for _ in range(3)]
    if group.rank == last:
        leaves()
        with pytest.raises(Left):
            group.broadcast(into[0], 0)
        with group._progress.lock:
            works = [group.broadcast(tensor, 0, async_op=True) for tensor in into]
        for work in works:
            work.wait()
    else:
        if group.rank == 0:
            time.sleep(0.05)
        for value, tensor in enumerate([into[0], *into], start=1):
            if group.rank == 0:
                tensor.fill_(value)
            group.broadcast(tensor, 0)
    found = [tensor[0].item() for tensor in into]
    agree(world, found == [2.0, 3.0, 4.0], str(found))


def test_queued_broadcasts_of_one_tensor_keep_their_order(world, on_nodes):
    group, last = on_nodes("alone"), world.size - 1
    for numel in (1, _NUMEL):
        for _ in range(5):
            tensor = torch.full((numel,), float(group.rank + 10))
            if group.rank == 0:
                time.sleep(0.005)
            for work in [group.broadcast(tensor, root, async_op=True) for root in (0, last, 0)]:
                work.wait()
            agree(world, bool((tensor == 10).all()), str(tensor[:3]))


def test_no_memory_for_data_of_another_length_ends_the_broadcasts_there(monkeypatch):
    """By the requests of one rank: a job of such a rank does not end by itself."""
    begun = []

    class Comm:
        def Ibcast(self, buf, root):
            begun.append(memoryview(buf[0]).nbytes)
            if begun[-1] == broadcasts.HEAD_BYTES:
                buf[0][: broadcasts.LENGTH_BYTES] = (4 * _NUMEL).to_bytes(8, "little")
            return SimpleNamespace(Test=lambda: True, Wait=lambda: None)

    def wait_all(requests):
        for one in requests:
            while not one.Test():
                pass

    def full(*args, **kwargs):
        raise RuntimeError("can't allocate memory")

    comm = SimpleNamespace(plain=Comm(), duplicate=Comm, rank=1, kept={}, wait_all=wait_all)
    tensors = [torch.zeros(10), torch.zeros(_NUMEL)]
    monkeypatch.setattr(broadcasts, "torch", SimpleNamespace(empty=full, uint8=torch.uint8))
    for tensor in tensors:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            broadcasts.execute(comm, [tensor], 0)
    # The second one's data would come into the place of the first one's.
    assert begun == [broadcasts.HEAD_BYTES]


def test_debug_mode_starts_none_early(world, on_nodes):
    on_nodes("alone")
    group = from_world("strict", 1800.0, debug=True)
    assert broadcasts.UPCOMING not in group._comm.kept
    tensors, works = issued(group, [0, world.size - 1])
    for work in works:
        work.wait()
    agree(world, are_right(tensors))
    group.close()
