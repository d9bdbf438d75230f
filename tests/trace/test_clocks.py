"""Offsets and clocks of round trips, made and measured, whose truth is known."""

import random
import time
from types import SimpleNamespace

import pytest

from mpidist.trace import clocks
from mpidist.trace.clocks import Clock, Offset, RoundTrip, clock_name, measured, offset_of, settled
from tests.tools.support import agree


def trips(offset_ns, start_ns, seed, count=50):
    """Return round trips with a clock that is behind rank 0's by an offset; each way 2 to 40 us."""
    draw = random.Random(seed)
    now = start_ns
    for _ in range(count):
        there, back = draw.randint(2000, 40000), draw.randint(2000, 40000)
        yield RoundTrip(now, now + there - offset_ns, now + there + back)
        now += there + back


@pytest.mark.parametrize("seed", range(20))
def test_error_of_an_offset_is_within_its_bound(seed):
    found = offset_of(trips(-7_000_000, 10**9, seed))
    assert abs(found.offset_ns + 7_000_000) <= found.error_ns <= 40000


@pytest.mark.parametrize("drift", [0.0, 5e-5, -1e-4])
def test_drift_is_removed(drift):
    """A clock of a second a minute: rank 0's time t is this clock's (t - 3 s) * (1 + drift)."""

    def own(time_ns):
        return int((time_ns - 3 * 10**9) * (1 + drift))

    def true(moment_ns):
        start = 10**10 + moment_ns
        sent, received = start, start + 8000
        return offset_of([RoundTrip(sent, own(start + 4000), received)])

    length = 60 * 10**9
    clock = Clock(true(0), true(length))
    assert not clock.has_jumped and clock.error_ns == 4000
    common = clock.common()
    for moment in range(0, length, length // 10):
        time_ns = 10**10 + moment
        assert abs(common(own(time_ns)) - time_ns) <= 2  # of rounding


def test_jump_is_said_and_bounds_the_error():
    clock = Clock(Offset(0, 500, 10), Offset(10**9, 5_000_500, 10))
    assert clock.has_jumped and clock.error_ns == 5_000_010
    assert clock.common()(123) == 623
    assert Clock(Offset(10, 0, 1), Offset(5, 0, 1)).has_jumped  # back


def test_one_clock_has_no_offset_unless_the_round_trips_say_another():
    assert settled(Offset(5, -300, 4000), True) == Offset(5, 0, 0)
    assert settled(Offset(5, -300, 4000), False) == Offset(5, -300, 4000)
    assert settled(Offset(5, 4001, 4000), True) == Offset(5, 4001, 4000)


def test_processes_of_another_boot_or_time_namespace_have_other_clocks(tmp_path, monkeypatch):
    own = clock_name()
    assert len(own) == 8 and own == clock_name()
    monkeypatch.setattr(clocks, "_PROC", tmp_path)
    assert clock_name() == b""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("one")
    (tmp_path / "self/ns").mkdir(parents=True)
    names = set()
    for namespace in ("time:[1]", "time:[2]"):
        (tmp_path / "self/ns/time").unlink(missing_ok=True)
        (tmp_path / "self/ns/time").symlink_to(namespace)
        names.add(clock_name())
    assert len(names) == 2 and own not in names


def test_one_moment_has_no_drift():
    clock = Clock(Offset(0, 7, 1), Offset(0, 7, 1))
    assert clock.common()(10) == 17 and not clock.has_jumped


class Link:
    """Communicator whose sends from rank 0 and to it take a time of their own."""

    def __init__(self, mpi, there_s, back_s):
        self._mpi, self._send_s = mpi, back_s if mpi.Get_rank() else there_s

    def __getattr__(self, name):
        return getattr(self._mpi, name)

    def Send(self, *args):
        """Send after the link's time."""
        time.sleep(self._send_s)
        self._mpi.Send(*args)


@pytest.mark.mpi
@pytest.mark.parametrize(("there_s", "back_s"), [(0.0, 0.0), (2e-3, 0.0), (0.0, 2e-3)])
def test_measured_clocks_are_true_within_the_stated_error(group, monkeypatch, there_s, back_s):
    """The ranks of a node read one clock, and here each reads another function of it."""
    rank, real = group.rank, time.monotonic_ns
    start = real()

    def own(time_ns):
        drift = (time_ns - start) * 300 * (-1) ** rank // 10**6
        return time_ns + 10**15 * rank + drift if rank else time_ns

    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic_ns=lambda: own(real())))
    monkeypatch.setattr(clocks, "clock_name", lambda: b"clock%03d" % rank)
    link = Link(group._comm.plain, there_s, back_s)
    first = measured(link, 5, 10)
    moments = [real()]
    while moments[-1] < moments[0] + 10**8:
        time.sleep(0.01)
        moments.append(real())
    clock = Clock(first, measured(link, 5, 10))
    common = clock.common()
    errors = [abs(common(own(moment)) - moment) for moment in moments]
    is_bounded = max(errors) <= clock.error_ns + 4  # of rounding
    # The fault of half the difference between both ways is there, and stated.
    is_stated = not rank or clock.error_ns >= (there_s + back_s) / 2 * 1e9
    agree(group, is_bounded and is_stated and not clock.has_jumped, f"{errors} {clock}")
