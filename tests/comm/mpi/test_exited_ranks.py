"""Ranks that exited, and the error of a wait for them."""

from types import SimpleNamespace

import pytest

from mpidist.comm.mpi import exited_ranks


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the clock's time in seconds; no rank has ended."""
    now = [1000.0]
    monkeypatch.setattr(exited_ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(exited_ranks, "_exit_times", {})
    return now


def test_an_exit_counts_after_the_grace_time(clock):
    exited_ranks.record(3)
    assert exited_ranks.among((0, 3, 5)) == (3,) and not exited_ranks.all_ended((3,))
    clock[0] += exited_ranks.GRACE_S + 0.1
    assert exited_ranks.all_ended((3,)) and not exited_ranks.all_ended((0, 3))
    exited_ranks.record(3)  # a second record does not restart the time
    assert exited_ranks.all_ended((3,))


def test_all_ended_needs_all_ranks(clock):
    exited_ranks.record(1)
    clock[0] += exited_ranks.GRACE_S + 0.1
    exited_ranks.record(2)
    assert not exited_ranks.all_ended((1, 2))
    clock[0] += exited_ranks.GRACE_S + 0.1
    assert exited_ranks.all_ended((1, 2)) and exited_ranks.among((2, 1)) == (2, 1)


def test_no_ranks_have_not_ended(clock):
    exited_ranks.record(1)
    clock[0] += 100
    assert not exited_ranks.all_ended(()) and exited_ranks.among(()) == ()


def test_a_rank_has_ended_only_after_its_messages_had_time_to_arrive(monkeypatch):
    monkeypatch.setattr(exited_ranks, "_exit_times", {})
    assert (
        exited_ranks.ended((0, 1)) == ()
        and not exited_ranks.all_ended((0, 1))
        and not exited_ranks.all_ended(())
    )
    exited_ranks.record(1)
    assert exited_ranks.among((0, 1)) == (1,) and exited_ranks.ended((0, 1)) == ()
    exited_ranks._exit_times[1] -= exited_ranks.GRACE_S + 1
    exited_ranks.record(1)  # the first record counts
    assert (
        exited_ranks.ended((0, 1)) == (1,)
        and exited_ranks.all_ended((1,))
        and not exited_ranks.all_ended((0, 1))
    )


def test_the_error_names_the_ranks():
    error = exited_ranks.failure("rank 0 of 3: recv", (1, 2))
    assert error.ranks == (1, 2)
    assert str(error) == "rank 0 of 3: recv waits for world ranks 1, 2, which exited"


def test_a_rank_that_died_counts_as_ended_and_is_named_dead(clock, monkeypatch):
    monkeypatch.setattr(exited_ranks, "_dead", set())
    exited_ranks.record(1)
    exited_ranks.record_death(2)
    assert exited_ranks.have_died((1, 2)) and not exited_ranks.have_died((0, 1))
    assert exited_ranks.among((0, 1, 2)) == (1, 2) and not exited_ranks.all_ended((2,))
    clock[0] += exited_ranks.GRACE_S + 0.1
    assert exited_ranks.all_ended((2,))
    assert "world rank 2, which died" in str(exited_ranks.failure("recv", (2,)))
    assert "world rank 1, which exited" in str(exited_ranks.failure("recv", (1,)))


def test_at_the_end_of_a_world_all_others_have_ended(clock, monkeypatch):
    world = SimpleNamespace(rank=1, size=4)
    monkeypatch.setattr(exited_ranks, "runtime", SimpleNamespace(world=lambda: world))
    exited_ranks.record(3)
    exited_ranks.record_end_of_world()
    assert exited_ranks.ended(range(4)) == (0, 2, 3)
