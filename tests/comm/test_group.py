"""Creation, division and end of groups; the monitored barrier."""

import threading
import time
from pathlib import Path

import pytest
import torch

from mpidist.errors import CommTimeout, GroupError
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_init_returns_the_same_group(world):
    from mpidist.comm import default, init

    assert init() is world and default() is world
    assert world.world_ranks == tuple(range(world.size))


def test_split_by_color_and_key(group):
    child = group.split(group.rank % 2, key=-group.rank)
    mine = [r for r in range(group.size) if r % 2 == group.rank % 2][::-1]
    ok = child.world_ranks == tuple(mine) and child.rank == mine.index(group.rank)
    total = torch.tensor([float(group.rank)])
    child.all_reduce(total)
    ok &= total.item() == sum(mine)
    child.close()
    agree(group, ok)


def test_split_leaves_out_ranks_without_a_color(group):
    child = group.split(None if group.rank == 0 else 0)
    agree(group, (child is None) == (group.rank == 0))
    if child is not None:
        child.barrier()
        child.close()
    if group.rank == 0:
        with pytest.raises(ValueError, match="color"):
            group.split(-3)


def test_new_group_is_for_its_members_and_in_their_order(group):
    ranks = list(range(group.size))[::-1][: max(1, group.size - 1)]
    child = group.new_group(ranks, "some")
    agree(group, (child is not None) == (group.rank in ranks))
    ok = True
    if child is not None:
        ok = (
            child.world_ranks == tuple(ranks)
            and ranks[child.rank] == group.rank
            and child.name == "some"
        )
        tensor = torch.tensor([float(group.rank)])
        child.broadcast(tensor, 0)
        ok &= tensor.item() == ranks[0]
        grandchild = child.new_group([0])
        if grandchild is not None:
            ok &= grandchild.world_ranks == (ranks[0],)
            grandchild.close()
        child.close()
    agree(group, ok)


@pytest.mark.parametrize("ranks", [[], [0, 0], [99], [-1], ["0"]])
def test_new_group_refuses(group, ranks):
    with pytest.raises((ValueError, TypeError), match="new_group"):
        group.new_group(ranks)


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


def test_many_groups_are_made_and_closed(group):
    for turn in range(60):
        child = group.split(0)
        tensor = torch.tensor([float(turn)])
        child.all_reduce(tensor)
        assert tensor.item() == turn * group.size
        child.close()


def test_closing_waits_for_queued_operations(group):
    child = group.clone("queued")
    tensors = [torch.full((1000,), float(turn)) for turn in range(20)]
    works = [child.all_reduce(tensor, async_op=True) for tensor in tensors]
    child.close()
    ok = all(work.is_completed() for work in works) and all(
        (t == i * group.size).all() for i, t in enumerate(tensors)
    )
    agree(group, ok)


def test_no_rank_leaves_a_monitored_barrier_before_all_arrive(group, tmp_path):
    folder = Path(group.broadcast_object(str(tmp_path), 0))
    seen = []
    for turn in range(5):
        # The other ranks are in the barrier by now, if it lets them wait.
        time.sleep(0.01 * group.rank)
        (folder / f"{turn} {group.rank}").touch()
        group.monitored_barrier(20)
        seen.append(len(list(folder.glob(f"{turn} *"))))
    agree(group, seen == [group.size] * 5, f"ranks that had arrived: {seen}")


def test_monitored_barrier_during_asynchronous_operations(group):
    # The group's thread enters the all-reduce before the barrier on one rank, after it on another.
    values = [torch.ones(3) for _ in range(50)]
    works = []
    for value in values:
        works.append(group.all_reduce(value, async_op=True))
        group.monitored_barrier(20)
    for work in works:
        work.wait()
    agree(group, all((value == group.size).all() for value in values))


@pytest.mark.mpi(min_size=2)
def test_monitored_barrier_names_missing_ranks_on_every_rank_that_arrived(group):
    late = group.size - 1
    if group.rank != late:
        with pytest.raises(CommTimeout, match=rf"rank {late} did not come within 0\.3 s"):
            group.monitored_barrier(0.3)
    group.barrier()
    if group.rank == late:  # rank 0 does not answer that number any more
        with pytest.raises(CommTimeout, match="rank 0 did not come"):
            group.monitored_barrier(0.3)
    group.barrier()
    group.monitored_barrier(20)


@pytest.mark.mpi(min_size=2)
def test_monitored_barrier_without_rank_0(group):
    if group.rank != 0:
        with pytest.raises(CommTimeout, match="rank 0 did not come"):
            group.monitored_barrier(0.2)
    else:
        group._monitored_barrier.number += 1
        # Arrivals for the first barrier must not count for the second.
    group.barrier()
    group.monitored_barrier(20)


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
def test_messages_after_the_close_do_not_reach_the_next_group(world):
    """Open MPI delivers them to the next communicator, where new messages are lost in exchange."""
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
