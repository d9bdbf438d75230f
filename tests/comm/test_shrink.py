"""Groups without some of another group's ranks: living ones, and dead ones under ULFM."""

import functools
import threading

import pytest
import torch

from mpidist.errors import CommTimeout, GroupError
from tests.tools.support import agree, printed, raises_on_all, short_job

SLOW = pytest.mark.slow


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("gone", [[0], [-1], [0, -1]], ids=["first", "last", "both"])
def test_the_remaining_ranks_keep_their_order(group, gone):
    excluded = sorted({rank % group.size for rank in gone})
    if len(excluded) == group.size:
        raises_on_all(group, ValueError, lambda: group.shrink(excluded), "not all")
        return
    left = [rank for rank in range(group.size) if rank not in excluded]
    facts = ()
    if group.rank in left:
        small = group.shrink(excluded)
        total = torch.tensor([float(group.rank)])
        small.all_reduce(total)
        work = small.all_gather_into_tensor(
            torch.empty(small.size), torch.tensor([float(small.rank)]), async_op=True
        )
        work.wait()
        # A group of the group, and the group itself, work as before.
        again = small.shrink([0]) if small.size > 1 and small.rank > 0 else None
        facts = (small.world_ranks, small.rank, total.item(), small.timeout_s, again and again.size)
        if again is not None:
            again.barrier()
            again.close()
        small.close()
    expected = (
        (
            tuple(group.world_ranks[rank] for rank in left),
            left.index(group.rank),
            float(sum(left)),
            group.timeout_s,
            len(left) - 1 if len(left) > 1 and group.rank != left[0] else None,
        )
        if group.rank in left
        else ()
    )
    agree(group, facts == expected, f"{facts} in place of {expected}")


@pytest.mark.mpi(min_size=2)
def test_wrong_ranks_are_refused_before_anything_is_sent(group):
    other = (group.rank + 1) % group.size
    for wrong, words in (
        ([], "needs at least one"),
        ([other, other], "none twice"),
        ([group.size], str(group.size)),
        ([group.rank], "this one is excluded"),
        (list(range(group.size)), "not all"),
    ):
        raises_on_all(group, ValueError, lambda wrong=wrong: group.shrink(wrong), words)
    group.barrier()


@pytest.mark.mpi(min_size=3)
def test_operations_under_way_are_named_or_aborted(group):
    """The excluded rank never comes to the all-reduce that the others have queued."""
    gate = threading.Event()
    if group.rank > 0:
        group.in_order(gate.wait, operation="a queued operation")
        try:
            group.shrink([0])
            words = "went through"
        except GroupError as error:
            words = str(error)
        gate.set()
        group.in_order(lambda: None).wait()
    else:
        words = "1 operations under way or queued"
        for _ in range(2):
            group.in_order(lambda: None).wait()
    agree(group, "1 operations under way or queued" in words, words)


@pytest.mark.mpi(min_size=3)
def test_ranks_that_disagree_get_an_error_on_each(group):
    """Rank 1 waits for rank 2, which waits for rank 0."""
    others = [rank for rank in range(group.size) if rank not in (1, 2)]
    words = "must exclude the same ranks"
    if group.rank in (1, 2):
        excluded = others if group.rank == 1 else [1, *others[1:]]
        with pytest.raises(CommTimeout) as caught:
            group.shrink(excluded, timeout=0.5)
        words = str(caught.value)
    agree(group, "must exclude the same ranks" in words, words)


@pytest.mark.mpi(min_size=2)
def test_a_closed_group_cannot_shrink(world, group):
    closed = group.clone()
    closed.close()
    raises_on_all(
        world, GroupError, lambda: closed.shrink([(group.rank + 1) % group.size]), "closed"
    )


@pytest.mark.mpi(min_size=2)
def test_ranks_leave_and_come_back_in_any_order(world, group):
    """A rank that was left out calls with the group that it has."""
    held, everyone = group.clone(), list(range(group.size))
    for step, members in enumerate((everyone[1:], everyone, everyone[:-1][::-1], everyone[::-1])):
        facts = wanted = ()
        if group.rank in members:
            world_ranks = [group.world_ranks[rank] for rank in members]
            before, held = held, held.regroup(world_ranks, f"{group.key} {step}")
            before.close()
            total = torch.tensor([float(group.rank)])
            held.all_reduce(total)
            facts = held.rank, held.size, held.world_ranks, total.item(), held.name
            wanted = members.index(group.rank), len(members), tuple(world_ranks)
            wanted += (float(sum(members)), before.name)
        agree(group, facts == wanted, f"{members}: {facts} in place of {wanted}")
    held.close()


@pytest.mark.mpi(min_size=2)
def test_groups_are_not_regrouped_by_mistake(world, group):
    ranks, gate = list(group.world_ranks), threading.Event()
    mine = ranks[group.rank]
    for wrong, words in (
        ([], "at least one"),
        ([*ranks, mine], "none twice"),
        ([*ranks, len(ranks)], str(len(ranks))),
        ([rank for rank in ranks if rank != mine], "not among"),
    ):
        call = functools.partial(group.regroup, wrong, "wrong")
        raises_on_all(world, ValueError, call, words)
    # The last rank names the others in another order.
    given = ranks[::-1] if group.rank == group.size - 1 else ranks
    call = functools.partial(group.regroup, given, f"{group.key} differs", timeout=0.5)
    raises_on_all(world, CommTimeout, call, "must give the same ranks and key")
    work = group.in_order(gate.wait)
    raises_on_all(world, GroupError, lambda: group.regroup(ranks, "queued"), "1 operations")
    gate.set()
    work.wait()
    closed = group.clone()
    closed.close()
    raises_on_all(world, GroupError, lambda: closed.regroup(ranks, "closed"), "closed")


_KILL = """
import faulthandler, json, os, signal, sys, threading, time, torch
import mpidist.comm
from mpidist.errors import MpidistError, RankFailureError
faulthandler.dump_traceback_later(60)  # where a job hangs
group = mpidist.comm.init(on_timeout={on_timeout!r})
facts, dead = {{"rank": group.rank, "sizes": []}}, {dead}
x = torch.ones(1000)
for lost in dead:
    twin = group.clone("twin")
    group.all_reduce(x)
    mine = group.world_ranks[group.rank]
    if mine == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.all_reduce(x)
    except RankFailureError:
        pass
    # Two threads shrink two groups, on some ranks in the other order.
    smaller, excluded = {{}}, [group.world_ranks.index(lost)]
    def shrink(old):
        smaller[old] = old.shrink(excluded, abort={abort})
    threads = [
        threading.Thread(target=shrink, args=(old,)) for old in (group, twin)[:: 1 - 2 * (mine % 2)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    small = smaller[group]
    counted = torch.ones(1)
    smaller[twin].all_reduce(counted)
    assert counted.item() == small.size == smaller[twin].size
    smaller[twin].close()
    total = torch.tensor([float(mine)])
    small.all_reduce(total)
    small.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    small.all_gather_object(mine)
    child = small.new_group(range(small.size))
    child.barrier()
    child.close()
    facts["sizes"].append((small.size, total.item()))
    group = small
print(json.dumps(facts), flush=True)
group.barrier()
time.sleep(0.5)
os._exit(0)
"""


@SLOW
@pytest.mark.parametrize(
    ("dead", "on_timeout", "abort"),
    [([1], "abort", False), ([0], "raise", True), ([3, 0], "raise", False)],
    ids=["a rank", "the first, aborting", "two in a row"],
)
def test_survivors_of_a_death_go_on(dead, on_timeout, abort):
    done = short_job(
        4, _KILL.format(dead=dead, on_timeout=on_timeout, abort=abort), "--with-ft", "ulfm"
    )
    found = printed(done)
    left, sizes = [0, 1, 2, 3], []
    for lost in dead:
        left.remove(lost)
        sizes.append([len(left), float(sum(left))])
    assert sorted(found) == left and all(one["sizes"] == sizes for one in found.values()), found
