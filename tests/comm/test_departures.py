"""Ranks that have come to the end of their program."""

from types import SimpleNamespace

import pytest

from mpidist.comm import departures


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose one number is what the clock says, in seconds; nobody has left yet."""
    now = [1000.0]
    monkeypatch.setattr(departures, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(departures, "_left", {})
    return now


def test_who_has_left_is_believed_after_a_while(clock):
    departures.note(3)
    assert departures.among((0, 3, 5)) == (3,) and not departures.have_left((3,))
    clock[0] += departures.GRACE_S + 0.1
    assert departures.have_left((3,)) and not departures.have_left((0, 3))
    departures.note(3)  # a second word does not start the time again
    assert departures.have_left((3,))


def test_all_who_are_asked_about_must_have_left(clock):
    departures.note(1)
    clock[0] += departures.GRACE_S + 0.1
    departures.note(2)
    assert not departures.have_left((1, 2))
    clock[0] += departures.GRACE_S + 0.1
    assert departures.have_left((1, 2)) and departures.among((2, 1)) == (2, 1)


def test_of_nobody_nothing_is_said(clock):
    departures.note(1)
    clock[0] += 100
    assert not departures.have_left(()) and departures.among(()) == ()


def test_a_rank_has_ended_only_after_what_it_sent_has_had_time_to_arrive(monkeypatch):
    monkeypatch.setattr(departures, "_left", {})
    assert departures.ended((0, 1)) == () and not departures.have_left((0, 1)) and not departures.have_left(())
    departures.note(1)
    assert departures.among((0, 1)) == (1,) and departures.ended((0, 1)) == ()
    departures._left[1] -= departures.GRACE_S + 1
    departures.note(1)  # said twice, it has ended when it said so first
    assert departures.ended((0, 1)) == (1,) and departures.have_left((1,)) and not departures.have_left((0, 1))


def test_the_error_names_the_ranks():
    error = departures.failure("rank 0 of 3: recv", (1, 2))
    assert error.ranks == (1, 2)
    assert str(error) == "rank 0 of 3: recv waits for world ranks 1, 2, which came to the end of the program"
