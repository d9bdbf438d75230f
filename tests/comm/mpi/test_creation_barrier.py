"""Barriers before communicators are made, and the errors that end waits for absent ranks."""

import re
import threading
import time
from datetime import timedelta
from unittest.mock import Mock

import pytest

from mpidist.comm.mpi import creation_barrier, exited_ranks
from mpidist.errors import CommTimeout, RankFailureError
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


@pytest.fixture
def gone(world, monkeypatch):
    """The last rank, which the other ranks regard as exited."""
    last = world.size - 1
    if world.rank != last:
        monkeypatch.setattr(exited_ranks, "_exit_times", {last: time.monotonic() - 60})
    return last


def test_two_threads_make_two_groups_in_either_order(group):
    names = ["left", "right"][:: 1 if group.rank % 2 else -1]
    made = {}

    def make(name):
        made[name] = group.new_group(range(group.size), name)

    for _ in range(3):
        threads = [threading.Thread(target=make, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        keys = group.all_gather_object([made[name].key for name in ("left", "right")])
        agree(group, all(key == keys[0] for key in keys), str(keys))
        for name in ("left", "right"):
            made[name].barrier()
            made[name].close()


def test_votes_of_two_threads_are_counted_apart(world, group):
    barrier, everyone = creation_barrier._world_barrier, list(range(world.size))
    results = {}
    # The tokens of ranks that gave up a wait, in tests before this one, stay.
    received = barrier._received.copy()

    def vote(subject, mine):
        results[subject] = barrier.agree("here", subject, everyone, mine)

    for last in (True, False):
        against = world.rank == world.size - 1 and not last
        words = [("all", True), ("some", not against)][:: 1 - 2 * (world.rank % 2)]
        threads = [threading.Thread(target=vote, args=each) for each in words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        agree(group, results == {"all": True, "some": last}, str(results))
    agree(group, barrier._received == received, str(barrier._received - received))


@pytest.mark.mpi(min_size=2)
def test_every_wait_for_a_rank_that_has_ended_names_it(group, gone):
    waits = {
        "new_group": lambda: group.new_group(range(group.size)),
        "monitored_barrier": group.monitored_barrier,
        "init": lambda: creation_barrier.wait_for_world("a test of those that end", 600),
        "recv_object": lambda: group.recv_object(gone),
    }
    results = {}
    if group.rank != gone:
        for name, wait in waits.items():
            try:
                wait()
                results[name] = "no error"
            except RankFailureError as error:
                results[name] = error.ranks
    group.barrier()
    agree(group, group.rank == gone or results == dict.fromkeys(waits, (gone,)), str(results))


@pytest.mark.mpi(min_size=2)
def test_waits_end_at_their_timeouts(group):
    last = group.size - 1
    text = ""
    group.barrier()
    if group.rank != last:
        with pytest.raises(CommTimeout) as raised:
            creation_barrier.wait_for_world("a test of timeouts", 0.2)
        text = str(raised.value)
    group.barrier()
    # Beside it may stand ranks that have given up before rank 0.
    expected = (
        rf"ranks? .*\b{last} did not come" if group.rank == 0 else "rank 0 did not let it begin"
    )
    agree(group, group.rank == last or re.search(expected, text) is not None, text)


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_waits_have_failed_meet_again(group):
    """However often each has failed; who has given up lets no other one pass."""

    def waits(limit):
        try:
            return creation_barrier.wait_for_world("a test of retries", limit)
        except CommTimeout:
            return None

    for alone, failures in ((0, 1), (group.size - 1, 2)):
        for place in (alone, group.size - 1 - alone):
            seen = [waits(0.1) for _ in range(failures)] if group.rank == place else []
            group.barrier()
            agree(group, not any(seen), f"rank {place} passed: {seen}")
        names = group.all_gather_object(waits(30))
        agree(group, len(set(names)) == 1 and names[0] is not None, f"{names}")


@pytest.mark.mpi(min_size=2)
def test_a_new_group_that_an_exception_has_left_is_made_by_the_next_call(group, monkeypatch):
    if group.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(group._state, "raise_failure", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                group.new_group(range(group.size), "left")
    group.barrier()
    made = group.new_group(range(group.size), "left")
    keys = group.all_gather_object(made.key)
    agree(group, len(set(keys)) == 1, f"{keys}")
    made.close()


@pytest.mark.mpi(min_size=2)
def test_a_monitored_barrier_without_time_does_not_wait(group):
    if group.rank == 0:
        for timeout in (0, timedelta(0)):
            with pytest.raises(CommTimeout, match="did not come within 0 s"):
                group.monitored_barrier(timeout)
    else:
        group._monitored_barrier.number += 2
    group.barrier()
    group.monitored_barrier(20)


@pytest.mark.mpi(min_size=2)
def test_the_stores_wait_ends_when_all_others_have(group, monkeypatch):
    from mpidist.comm.store.rendezvous import shared_store

    store = shared_store()
    others = {rank: time.monotonic() - 60 for rank in group.world_ranks if rank != group.rank}
    group.barrier()
    monkeypatch.setattr(exited_ranks, "_exit_times", others)
    with pytest.raises(RankFailureError, match="the store's keys") as raised:
        store.wait(["never"], timedelta(seconds=600))
    monkeypatch.undo()
    agree(group, raised.value.ranks == tuple(others))


def test_a_start_has_a_minute_at_least():
    assert creation_barrier.start_limit(None) is None
    assert creation_barrier.start_limit(0.5) == 60 and creation_barrier.start_limit(1800) == 1800
