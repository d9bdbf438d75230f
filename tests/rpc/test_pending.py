"""Calls that wait for their answers: taken once, late ones in any order."""

import threading
from types import SimpleNamespace

import pytest

from mpidist.errors import CommTimeout
from mpidist.rpc import call as calls_module
from mpidist.rpc import pending as pending_module
from mpidist.rpc.call import Call
from mpidist.rpc.pending import PendingCalls


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose one number is what both modules' clock says, in seconds."""
    now = [1000.0]
    for module in (calls_module, pending_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_pending_calls_time_out_in_any_order(clock):
    pending = PendingCalls()
    calls = [Call(0, "x", seconds) for seconds in (0, 2, 100, 1)]
    for call in calls:
        call.sequence = pending.next_sequence()
        pending.add(call)
    assert not pending.has_expired()
    clock[0] += 3
    assert pending.has_expired() and set(pending.expired()) == {calls[1], calls[3]}
    assert not pending.has_expired() and len(pending) == 2
    assert pending.pop(calls[2].sequence) is calls[2] and pending.pop(calls[2].sequence) is None
    assert pending.taken(lambda call: True) == [calls[0]]
    assert isinstance(calls[1].timed_out(), CommTimeout)


def test_each_call_is_taken_by_one_thread_alone():
    pending = PendingCalls()
    for _ in range(500):
        call = Call(0, "x", 0)
        call.sequence = pending.next_sequence()
        pending.add(call)
    taken, start = [], threading.Barrier(4)

    def take():
        start.wait(10)
        for sequence in range(1, 501):
            if (call := pending.pop(sequence)) is not None:
                taken.append(call.sequence)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 501)) and len(pending) == 0
