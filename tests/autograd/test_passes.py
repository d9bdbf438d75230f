"""A pass at its initiator: end, first error, and timeout without progress."""

from __future__ import annotations

import pytest

from mpidist.autograd import passes
from mpidist.autograd.passes import Pass
from mpidist.errors import CommTimeout, MpidistError

NAMES = ["w0", "w1", "w2"]


@pytest.fixture(autouse=True)
def _reports_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(passes, "_REPORT_S", 1e-3)


def waiting(*steps):
    """Return a wait that runs one step per call; without steps left, the deadline passes."""
    left = list(steps)

    def wait(call):
        if left:
            left.pop(0)()
        else:
            call.deadline = 0.0

    return wait


def no_probe(running):
    raise AssertionError("there was progress")


def test_it_is_over_when_all_that_were_sent_gradients_are_complete():
    running = Pass(1, 1, 0)
    # Rank 2 is complete before any worker has reported gradients for rank 2.
    running.complete(2, [])
    running.complete(0, [1])
    assert running.involves(1) and running.members() == {1}
    running.complete(1, [0, 2])
    running.wait(waiting(), 1.0, no_probe, NAMES)
    assert not running.involves(1)


def test_the_first_error_ends_it():
    running = Pass(1, 1, 0)

    def fails():
        running.fail(ValueError("first"))
        running.fail(ValueError("second"))

    with pytest.raises(ValueError, match="first"):
        running.wait(waiting(fails), 1.0, no_probe, NAMES)


def test_progress_here_or_elsewhere_extends_the_time():
    running, probes = Pass(1, 1, 0), []

    def probe(of):
        probes.append(sorted(of.members()))
        if len(probes) == 1:
            of.report(1, 0.0, ["x"], [])  # busy
        elif len(probes) == 2:
            of.report(1, 0.0, ["x"], [2])  # has sent to rank 2
        else:
            of.report(1, 9.0, ["x of w2"], [])
            of.report(2, 9.0, [], [])
        return 9.0, ["mine"]

    running.expect([1])
    with pytest.raises(CommTimeout, match=r'mode="smart".*w0 waits for mine; w1 waits for x of w2'):
        running.wait(waiting(running.progress), 1e-3, probe, NAMES)
    assert probes == [[1], [1], [1, 2]]


def test_a_worker_that_does_not_answer_is_named():
    running = Pass(1, 1, 0)
    running.expect([2])

    def silent(of):
        of._reports.clear()
        return 9.0, []

    with pytest.raises(CommTimeout, match="w2 waits for an answer of its own"):
        running.wait(waiting(), 1e-3, silent, NAMES)


def test_a_wait_that_ends_early_is_the_end_of_rpc():
    running = Pass(1, 1, 0)
    with pytest.raises(MpidistError, match="shut down"):
        running.wait(lambda call: None, 100.0, no_probe, NAMES)
