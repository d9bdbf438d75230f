"""Work: waits, timeouts in torch's forms, errors, and a future where one is asked for."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from mpidist.comm.execution.work import Work, seconds
from mpidist.errors import CommTimeout, MpidistError


@pytest.fixture
def work():
    return Work("all_reduce", (torch.ones(2),), "rank 0 of 2: all_reduce")


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [(None, None), (0, None), (timedelta(0), None), (2, 2.0), (0.5, 0.5),
     (timedelta(minutes=1), 60.0), (timedelta.max, None), (float("inf"), None)],
)  # fmt: skip
def test_timeouts_are_seconds(timeout, expected):
    assert seconds(timeout) == expected


@pytest.mark.parametrize(
    ("timeout", "error"),
    [("1", TypeError), (True, TypeError), (-1, ValueError), (timedelta(-1), ValueError),
     (float("nan"), ValueError)],
)  # fmt: skip
def test_other_timeouts_are_refused(timeout, error, work):
    with pytest.raises(error, match="timeout must"):
        seconds(timeout)
    with pytest.raises(error, match="timeout must"):
        work.wait(timeout)


def test_a_work_that_is_only_waited_for_makes_no_future(work):
    helped = []

    def help(one):
        helped.append(one)
        one.end(one.tensors, None)

    work.helped_by(help)
    assert not work.is_completed() and work.wait() and work.is_completed()
    assert helped == [work] and work._future is None and work.exception() is None
    # Made afterwards, it is complete.
    future = work.get_future()
    assert future is work.get_future() and future.done() and future.wait() is work.tensors
    assert work.result() is work.tensors and work.wait() and helped == [work]


def test_a_future_made_before_the_end_is_completed_and_helps(work):
    seen = []
    work.helped_by(lambda one: seen.append(one) or work.end(work.tensors, None)())
    future = work.get_future()
    assert not work.has_callbacks() and not future.done()
    future.add_done_callback(lambda one: seen.append((one.done(), work.is_completed())))
    assert work.has_callbacks() and work.wait()
    assert seen == [future, (True, True)]


def test_an_error_is_raised_by_every_wait_and_is_the_futures(work):
    error = MpidistError("lost")
    work.end(None, error)
    assert work.is_completed() and work.exception() is error
    work.wait_quietly()
    for wait in (work.wait, work.get_future().wait, lambda: work.wait(1)):
        with pytest.raises(MpidistError, match="lost"):
            wait()


def test_an_operations_own_timeout_is_raised_as_it_is(work):
    work.end(None, CommTimeout("its own"))
    for limit in (None, 1.0):
        with pytest.raises(CommTimeout, match=r"^its own$"):
            work.wait(limit)


def test_an_error_that_nobody_waits_for_is_printed(capfd):
    work = Work("all_reduce", (), "rank 0 of 2: all_reduce")
    work.end(None, MpidistError("lost"))
    del work
    assert "an exception was never retrieved: MpidistError('lost')" in capfd.readouterr().err


def test_a_wait_with_a_limit_does_not_help_and_names_the_operation(work):
    work.helped_by(lambda one: pytest.fail("helped"))
    with pytest.raises(CommTimeout, match=r"rank 0 of 2: all_reduce did not end within 0.01 s"):
        work.wait(0.01)
    work.end(work.tensors, None)
    assert work.wait(0.01)


def test_threads_that_wait_are_woken(work):
    threads = [threading.Thread(target=work.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    work.end(work.tensors, None)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_the_events_of_a_device_block_the_waiting_threads_stream():
    class Event:
        blocked = 0

        def block_current_stream(self):
            self.blocked += 1

    event, events = Event(), []
    work = Work("all_reduce", (torch.ones(2),), "", events)
    events.append(event)
    work.end(work.tensors, None)
    assert work.wait() and event.blocked == 1
    work.get_future().wait()
    assert event.blocked == 2


def test_completing_and_asking_for_the_future_at_once_lose_nothing():
    for _ in range(200):
        work, gate, found = Work("x", (torch.ones(1),), "x"), threading.Barrier(2), []

        def ask(work=work, gate=gate, found=found):
            gate.wait()
            found.append(work.get_future())

        other = threading.Thread(target=ask)
        other.start()
        gate.wait()
        work.end(work.tensors, None)
        other.join()
        assert found[0].wait(60) is work.tensors and work.wait()
