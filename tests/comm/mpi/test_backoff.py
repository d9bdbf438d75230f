"""Polling with back-off, on a clock that advances with tests and pauses only."""

import os
from types import SimpleNamespace

import pytest

from mpidist.comm.mpi import backoff


@pytest.fixture
def pauses(monkeypatch):
    """The pauses, in order: 0 for a yield, seconds for a sleep; a clock reading takes 10 µs."""
    now, taken = [0.0], []

    def monotonic():
        now[0] += 10e-6
        return now[0]

    def pause(seconds):
        taken.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(backoff, "time", SimpleNamespace(monotonic=monotonic, sleep=pause))
    monkeypatch.setattr(backoff, "os", SimpleNamespace(sched_yield=lambda: pause(0)))
    return taken


def countdown(tests):
    """Return a condition that is true at its ``tests``-th test."""
    left = iter(range(tests - 1, -1, -1))
    return lambda: next(left) == 0


@pytest.mark.parametrize("tests", [1, 2, 4])
def test_a_short_wait_has_no_pauses(pauses, tests):
    assert backoff.until(countdown(tests))
    assert not pauses


def test_a_long_wait_yields_and_then_sleeps(pauses):
    assert backoff.until(countdown(70))
    assert pauses == sorted(pauses) and set(pauses) == {0, backoff.SLEEP_S}


def test_sleeps_grow_with_the_wait_up_to_the_longest(pauses):
    assert backoff.until(countdown(400), longest_s=1e-3)
    now = 2 * backoff.SPIN_S  # the readings before the first pause, and more
    for pause in pauses:
        # Yields take no time on this clock; a reading takes 10 µs.
        now += 10e-6
        assert pause <= max(backoff.SLEEP_S, now / 16) + 1e-9
        now += pause
    sleeps = [pause for pause in pauses if pause]
    assert sleeps == sorted(sleeps)
    assert sleeps[0] == backoff.SLEEP_S and sleeps[-1] == 1e-3
    assert any(backoff.SLEEP_S < pause < 1e-3 for pause in sleeps)


def test_a_wait_without_spins_and_yields_sleeps_for_the_given_time(pauses):
    assert backoff.until(countdown(4), spin_s=0, yield_s=0, sleep_s=2.0)
    assert pauses == [2.0, 2.0]


def test_the_limit_ends_the_wait_after_at_least_one_test(pauses):
    tests = []
    assert not backoff.until(lambda: tests.append(1), timeout_s=0.01)
    assert sum(pauses) < 0.0101
    assert backoff.until(lambda: True, timeout_s=0)
    assert not backoff.until(lambda: False, timeout_s=0)


def test_the_check_ends_the_wait_by_its_error(pauses):
    checks = []

    def check():
        checks.append(len(pauses))
        if len(checks) == 3:
            raise KeyError

    with pytest.raises(KeyError):
        backoff.until(lambda: False, check)
    assert checks == [0, 1, 2]  # one before each pause, none while there are no pauses


def test_a_wait_ends_with_the_real_clock_and_yield():
    """Without a fake clock."""
    assert backoff.os is os and backoff.until(countdown(2000))
