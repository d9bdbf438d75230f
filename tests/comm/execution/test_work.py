"""Work: timeouts in torch's forms, waits, errors and results."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from mpidist.comm.execution.work import Work, seconds
from mpidist.errors import CommTimeout, MpidistError


def work_of(events=None):
    return Work("all_reduce", (torch.ones(1),), "rank 0 of 2: all_reduce", events)


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [(None, None), (0, None), (timedelta(0), None), (2, 2.0), (0.5, 0.5),
     (timedelta(minutes=1), 60.0)],
)  # fmt: skip
def test_timeouts_are_seconds(timeout, expected):
    assert seconds(timeout) == expected


@pytest.mark.parametrize(
    ("timeout", "error"),
    [("1", TypeError), (True, TypeError), (-1, ValueError), (timedelta(-1), ValueError)],
)
def test_other_timeouts_are_refused(timeout, error):
    with pytest.raises(error, match="timeout must"):
        seconds(timeout)
    with pytest.raises(error, match="timeout must"):
        work_of().wait(timeout)


def test_a_wait_ends_with_the_operation_or_with_its_timeout():
    work = work_of()
    assert not work.is_completed() and work.exception() is None and work.source_rank() == -1
    with pytest.raises(CommTimeout, match=r"^rank 0 of 2: all_reduce did not end within 0.01 s$"):
        work.wait(0.01)
    timer = threading.Timer(0.02, work.future.set_result, [work.tensors])
    timer.start()
    assert work.wait(30) and work.wait() and work.is_completed()
    assert work.result() is work.tensors and work.get_future() is work.future
    timer.join()


def test_an_operations_own_error_is_raised_also_if_it_is_a_timeout():
    for error in (MpidistError("broken"), CommTimeout("its own")):
        work = work_of()
        work.future.set_exception(error)
        assert work.is_completed() and work.exception() is error
        for limit in (None, 1.0):
            with pytest.raises(type(error), match=str(error)):
                work.wait(limit)


def test_the_waiting_threads_stream_waits_for_the_events():
    class Event:
        blocked = 0

        def block_current_stream(self):
            self.blocked += 1

    event = Event()
    work = work_of([event])
    work.future.set_result(work.tensors)
    assert work.wait() and event.blocked == 1
