"""Barrier with a timeout whose error names the missing ranks."""

import time
from pathlib import Path

import pytest
import torch

from mpidist.comm import monitored_barrier
from mpidist.errors import CommTimeout
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


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
def test_monitored_barrier_names_missing_ranks_on_every_rank_that_arrived(group, monkeypatch):
    late = group.size - 1
    if group.rank != late:
        with pytest.raises(CommTimeout, match=rf"rank {late} did not come within 0\.3 s"):
            group.monitored_barrier(0.3)
    group.barrier()
    if group.rank == late:  # rank 0 does not answer that number any more
        monkeypatch.setattr(monitored_barrier, "_GRACE_S", 0.1)
        with pytest.raises(CommTimeout, match="rank 0 did not come"):
            group.monitored_barrier(0.3)
    group.barrier()
    monkeypatch.undo()
    group.monitored_barrier(20)


@pytest.mark.mpi(min_size=2)
def test_monitored_barrier_without_rank_0(group, monkeypatch):
    monkeypatch.setattr(monitored_barrier, "_GRACE_S", 0.1)
    if group.rank != 0:
        with pytest.raises(CommTimeout, match="rank 0 did not come"):
            group.monitored_barrier(0.2)
    else:
        group._monitored_barrier.number += 1
        # Arrivals for the first barrier must not count for the second.
    group.barrier()
    monkeypatch.undo()
    group.monitored_barrier(20)
