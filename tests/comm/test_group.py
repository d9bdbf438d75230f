"""Creation, division and end of groups; the monitored barrier."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from mpidist.comm import monitored_barrier
from mpidist.comm.mpi import closed_communicators
from mpidist.errors import CommTimeout, GroupError
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_init_returns_the_same_group(world):
    from mpidist.comm import default, init

    assert init() is world and default() is world
    assert world.world_ranks == tuple(range(world.size))


def test_a_closed_group_refuses_calls(group):
    child = group.clone("short-lived")
    child.barrier()
    child.close()
    child.close()
    for call in (
        child.barrier,
        lambda: child.all_reduce(torch.ones(1)),
        lambda: child.isend(torch.ones(1), 0),
        lambda: child.split(0),
    ):
        with pytest.raises(GroupError, match="closed"):
            call()
    assert child.is_closed and "closed" in repr(child)
    group.barrier()


def test_closing_waits_for_queued_operations(group):
    child = group.clone("queued")
    tensors = [torch.full((1000,), float(turn)) for turn in range(20)]
    works = [child.all_reduce(tensor, async_op=True) for tensor in tensors]
    child.close()
    ok = all(work.is_completed() for work in works) and all(
        (t == i * group.size).all() for i, t in enumerate(tensors)
    )
    agree(group, ok)


def test_a_timeout_of_zero_is_none_however_it_is_set(group):
    child = group.clone("patient")
    for zero in (0, 0.0, timedelta(0), None, timedelta.max):
        child.timeout_s = zero
        assert child.timeout_s is None
    child.timeout_s = timedelta(minutes=1)
    assert child.timeout_s == 60
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout must not"):
            child.timeout_s = wrong
    child.close()


def test_threads_that_close_a_group_at_once_close_it_once(group):
    for _ in range(3):
        child, tensor, errors = group.clone("shared"), torch.ones(1000), []

        def close(child=child, errors=errors):
            try:
                child.close()
                assert child.is_closed
            except BaseException as error:
                errors.append(error)

        # The queue is not empty while both close.
        with child._progress.lock:
            work = child.all_reduce(tensor, async_op=True)
            threads = [threading.Thread(target=close) for _ in range(2)]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(60)
        entries = closed_communicators.kept().count(child._state.mpi)
        ok = work.is_completed() and bool(tensor.eq(group.size).all())
        agree(group, ok and not errors and entries == 1, f"{errors} {entries}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["prepared", "launched"])
def test_closing_waits_for_a_synchronous_call_of_another_thread(group, way):
    child, is_late = group.clone("shared"), group.rank == 0
    tensor = torch.ones(4) if way == "prepared" else torch.ones(4, 2).t()
    child.all_reduce(tensor)
    done = []

    def reduce():
        child.all_reduce(tensor)
        done.append("reduced")

    thread = threading.Thread(target=reduce)
    if is_late:
        time.sleep(0.2)
    thread.start()
    if is_late:
        thread.join(60)
    while child.journal.sequence < 2:
        time.sleep(1e-3)
    child.close()
    done.append("closed")
    thread.join(60)
    ok = done == ["reduced", "closed"] and bool(tensor.eq(group.size**2).all())
    agree(group, ok, f"{done} {tensor}")


@pytest.mark.mpi(min_size=2)
def test_messages_without_a_receive_do_not_reach_the_next_group(world):
    """MPICH gives the context of a freed communicator to the next one."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for numel in (3, 100_000):
        group = world.clone("forgetful")
        group.isend(torch.full((numel,), -1.0), right, tag=5)
        root = world.size - 1
        if world.rank == 0:
            with pytest.raises(ValueError, match="object_list"):
                # The messages of the refusal to the other ranks are not received.
                group.scatter_object([1] * (group.size + 1), 0)
        world.barrier()
        with pytest.warns(
            ResourceWarning,
            match=rf"from rank {left} \(tag 5, {4 * numel} bytes\) was never received",
        ):
            group.close()
        world.barrier()
        after = world.clone("next")
        into = torch.zeros(numel)
        work = after.isend(torch.full((numel,), 7.0), right, tag=5)
        after.recv(into, left, tag=5)
        work.wait()
        objects = after.gather_object(world.rank, root)
        ok = objects == list(range(world.size)) if world.rank == root else objects is None
        agree(world, ok and bool((into == 7).all()), f"{into[:3]} {objects}")
        after.close()


@pytest.mark.mpi(min_size=2)
def test_messages_after_the_close_do_not_reach_the_next_group(world, monkeypatch):
    """Open MPI delivers them to the next communicator, where new messages are lost in exchange."""
    monkeypatch.setattr(monitored_barrier, "_GRACE_S", 0.1)
    for earlier in (0, 5):
        group = world.clone("left")
        for _ in range(earlier):
            if world.rank == 1:
                group.send(torch.ones(1), 0, 5)
            elif world.rank == 0:
                group.recv(torch.ones(1), 1, 5)
        if world.rank == 1:
            # Rank 0 has closed the group when the withdrawal of this rank's arrival comes.
            with pytest.raises(CommTimeout, match="rank 0 did not come"):
                group.monitored_barrier(0.2)
        group.close()
        world.barrier()
        after = world.clone("next")
        ok = True
        for _ in range(2 * earlier + 3):
            total = torch.ones(70_001, dtype=torch.int8)
            after.all_reduce(total)
            ok &= bool((total == world.size).all())
            # At three ranks the all-reduce has no message from rank 1 to rank 0.
            word = torch.full((1,), 7.0)
            if world.rank == 1:
                after.send(word, 0, 5)
            elif world.rank == 0:
                after.recv(word.zero_(), 1, 5)
            ok &= word.item() == 7
        agree(world, ok)
        after.close()


def test_stages_of_a_synchronous_operation_precede_what_another_thread_issues(group):
    """The second stage waited for the other thread's operation, which waited for its lock."""
    mine, theirs, works, ended = torch.ones(2), torch.ones(2), [], []

    def stages():
        group.broadcast(mine, 0)
        other = threading.Thread(
            target=lambda: works.append(group.all_reduce(theirs, async_op=True))
        )
        other.start()
        other.join()
        group.all_reduce(mine)
        ended.append(works[0].is_completed())

    group.in_order(stages, async_op=False)
    works[0].wait()
    expected = [float(group.size)] * 2
    agree(group, mine.tolist() == theirs.tolist() == expected and ended == [False])


def test_a_waiting_thread_executes_operations_of_several_stages(group):
    mine, x = torch.ones(2), torch.ones(2)

    def stages():
        group.all_reduce(mine)
        group.all_reduce(mine, async_op=True).wait()

    for _ in range(40):
        mine.fill_(1)
        work = group.in_order(stages)
        group.all_reduce(x.fill_(1))  # behind the queue
        work.wait()
    agree(group, mine.tolist() == [float(group.size) ** 2] * 2 and x[0] == group.size, f"{mine}")
