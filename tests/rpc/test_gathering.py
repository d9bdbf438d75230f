"""One object of each worker at all of them, by calls."""

import pytest
import torch

from mpidist.errors import MpidistError
from mpidist.rpc import gathering
from tests.support import agree

pytestmark = pytest.mark.mpi


def test_every_worker_gets_every_workers_object_each_time(group, workers):
    for turn in range(3):
        got = gathering.all_gather({"of": group.rank, "turn": turn, "tensor": torch.full((3,), float(group.rank))})
        ok = list(sorted(got)) == sorted(workers)
        ok &= all(got[name]["of"] == rank and got[name]["turn"] == turn for rank, name in enumerate(workers))
        ok &= all(bool((got[name]["tensor"] == rank).all()) for rank, name in enumerate(workers))
        agree(group, ok, f"turn {turn}: {got}")


@pytest.mark.mpi(min_size=2)
def test_some_workers_gather_among_themselves(group, workers):
    some = workers[1:]
    if workers[group.rank] in some:
        got = gathering.all_gather(group.rank, some)
        ok = got == {name: rank for rank, name in enumerate(workers) if name in some}
    else:
        ok = True
    agree(group, ok)
    gathering.barrier(workers)


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_does_not_come_is_named(group, workers):
    late = workers[-1]
    if workers[group.rank] == late:
        ok = True
    else:
        with pytest.raises(MpidistError) as caught:
            gathering.all_gather(group.rank, workers, timeout=0.2)
        # The leader misses the last worker; the others miss the leader's word.
        ok = group.rank != 0 or late in str(caught.value)
        ok &= "timed out in _all_gather after 0.20 seconds" in str(caught.value)
    agree(group, ok)
