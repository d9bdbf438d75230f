"""All-gather of one object from each worker, by calls."""

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from mpidist.rpc import current, worker_gather
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_every_worker_gets_every_workers_object_each_time(group, workers):
    for turn in range(3):
        got = worker_gather.all_gather(
            {"of": group.rank, "turn": turn, "tensor": torch.full((3,), float(group.rank))}
        )
        ok = list(sorted(got)) == sorted(workers)
        ok &= all(
            got[name]["of"] == rank and got[name]["turn"] == turn
            for rank, name in enumerate(workers)
        )
        ok &= all(bool((got[name]["tensor"] == rank).all()) for rank, name in enumerate(workers))
        agree(group, ok, f"turn {turn}: {got}")


@pytest.mark.mpi(min_size=2)
def test_some_workers_gather_among_themselves(group, workers):
    some = workers[1:]
    if workers[group.rank] in some:
        got = worker_gather.all_gather(group.rank, some)
        ok = got == {name: rank for rank, name in enumerate(workers) if name in some}
    else:
        ok = True
    agree(group, ok)
    worker_gather.barrier(workers)


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_does_not_come_is_named(group, workers):
    late = workers[-1]
    if workers[group.rank] == late:
        ok = True
    else:
        with pytest.raises(MpidistError) as caught:
            worker_gather.all_gather(group.rank, workers, timeout=0.2)
        # The leader misses the last worker; the others miss the leader's word.
        ok = group.rank != 0 or late in str(caught.value)
        ok &= "timed out in _all_gather after 0.20 seconds" in str(caught.value)
    agree(group, ok)


@pytest.mark.mpi(min_size=2)
def test_what_is_sent_ahead_is_bounded_and_dropped_at_the_end(group, workers):
    """A worker may be some gatherings ahead of the leader; its messages end with the agent."""
    leader, sender = workers[0], workers[1]
    generation = current.require().generation
    refused = 0
    if group.rank == 1:
        for number in range(100):
            arguments = (f"{generation}:{number}:{leader} {sender}", sender, b"x", {leader, sender})
            try:
                rpc.rpc_sync(leader, worker_gather.gather_to_leader, args=arguments)
            except MpidistError as error:
                refused += "too far ahead" in str(error)
    group.barrier()
    ok = refused == (36 if group.rank == 1 else 0) and len(worker_gather._states) == (
        64 if group.rank == 0 else 0
    )
    agree(group, ok, f"{refused} refused, {len(worker_gather._states)} kept")
    rpc.shutdown()
    agree(group, not worker_gather._states and not worker_gather._counts)


@pytest.mark.mpi(min_size=2)
def test_only_the_leader_sends_results_and_only_to_waiting_workers(group, workers):
    arguments = f"{current.require().generation}:0:{' '.join(workers)}", dict.fromkeys(workers)
    if group.rank == 0:
        with pytest.raises(MpidistError, match="has not given its part"):
            rpc.rpc_sync(workers[1], worker_gather.broadcast_to_follower, args=arguments)
    elif group.rank == 1:
        with pytest.raises(MpidistError, match="does not lead it"):
            rpc.rpc_sync(workers[0], worker_gather.broadcast_to_follower, args=arguments)
    group.barrier()
    agree(group, not worker_gather._states)
    got = worker_gather.all_gather(group.rank)
    agree(group, got == {name: rank for rank, name in enumerate(workers)})


@pytest.mark.mpi(min_size=2)
def test_a_gathering_that_was_late_leaves_nothing(group, workers):
    if group.rank != group.size - 1:
        with pytest.raises(MpidistError):
            worker_gather.all_gather(group.rank, workers, timeout=0.1)
    group.barrier()
    if group.rank == group.size - 1:
        with pytest.raises(MpidistError):
            worker_gather.all_gather(group.rank, workers, timeout=0.1)
    group.barrier()
    agree(group, not worker_gather._states, f"{list(worker_gather._states)}")
    got = worker_gather.all_gather(group.rank)
    agree(group, sorted(got) == sorted(workers))
