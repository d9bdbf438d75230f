"""Who polls and who runs what was found: leader, the thread that stands by, the pool, and callers that wait."""

from __future__ import annotations

import threading
import time

import pytest

from mpidist.rpc.call import Call
from mpidist.rpc.polling import NOTHING_LEFT, Action, Polling


class Source:
    """What a polling thread finds: actions that a test puts there."""

    def __init__(self):
        self.actions = []
        self.pollers = set()
        self.at_once = 0

    def poll(self):
        self.at_once += 1
        assert self.at_once == 1  # one thread at a time
        self.pollers.add(threading.current_thread().name)
        found = self.actions.pop(0) if self.actions else None
        self.at_once -= 1
        return found


@pytest.fixture
def polled():
    source = Source()
    polling = Polling(source.poll, 2, "test")
    polling.start()
    yield source, polling
    assert polling.stop(5)


def test_a_stuck_leader_is_replaced(polled):
    source, _ = polled
    gate, done = threading.Event(), threading.Event()
    source.actions.append(Action(gate.wait, True))
    time.sleep(0.1)
    source.actions.append(Action(done.set, True))
    assert done.wait(2)
    gate.set()


def test_no_more_actions_run_at_once_than_the_pool_has_threads(polled):
    source, polling = polled
    gate, running, most, lock = threading.Event(), [0], [0], threading.Lock()

    def run():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.wait(5)
        with lock:
            running[0] -= 1

    source.actions.extend(Action(run, True) for _ in range(6))
    time.sleep(0.3)
    assert most[0] == 2
    gate.set()
    deadline = time.monotonic() + 5
    while polling.counts()[2] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert polling.counts()[2] == 0


def test_who_waits_polls_and_hands_on_what_may_block(polled):
    source, polling = polled
    call, ran_in = Call(0, "x", 5), []
    source.actions.append(Action(lambda: ran_in.append(threading.current_thread().name), True))
    source.actions.append(NOTHING_LEFT)
    source.actions.append(Action(call.finish, False))
    polling.wait(call, call.deadline)
    deadline = time.monotonic() + 5
    while not ran_in and time.monotonic() < deadline:
        time.sleep(0.001)
    assert call.done and ran_in[0] != threading.current_thread().name
    late = Call(0, "x", 0.05)
    polling.wait(late, late.deadline)
    assert not late.done


def until(holds, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    return holds()


def test_a_handler_that_waits_leaves_its_place_to_others(polled):
    """Calls nest deeper than the pool: more handlers wait at once than may run."""
    source, polling = polled
    calls = [Call(0, "x", 20) for _ in range(5)]
    entered, left = [], []

    def wait_for(call):
        entered.append(call)
        polling.wait(call, call.deadline)
        left.append(call.done)

    source.actions.extend(Action(lambda call=call: wait_for(call), True) for call in calls)
    assert until(lambda: len(entered) == 5), len(entered)
    assert left == []
    source.actions.extend(Action(call.finish, False) for call in calls)
    assert until(lambda: left == [True] * 5), left
    assert until(lambda: polling.counts()[2] == 0)


def test_what_waits_for_a_place_runs_in_its_order():
    polling = Polling(lambda: None, 1, "test")
    polling.start()
    gate, ran = threading.Event(), []
    polling.submit(lambda: gate.wait(10))
    for number in range(20):
        polling.submit(lambda number=number: ran.append(number))
    assert ran == [] and polling.counts()[2] == 21
    gate.set()
    assert until(lambda: polling.counts()[2] == 0) and ran == list(range(20))
    assert polling.stop(5)


def test_a_thread_that_issues_calls_looks_once_by_itself(polled):
    source, polling = polled
    ran = []

    def note(what):
        ran.append((what, threading.current_thread() is threading.main_thread()))

    for _ in range(1000):  # the leader may be faster
        source.actions.append(Action(lambda: note("at once"), False))
        polling.help()
        if ("at once", True) in ran:
            break
    assert ("at once", True) in ran
    for _ in range(50):
        source.actions.append(Action(lambda: note("may block"), True))
        polling.help()
    assert until(lambda: not source.actions and polling.counts()[2] == 0)
    assert ("may block", False) in ran and ("may block", True) not in ran


def test_a_thread_knows_whether_it_leads(polled):
    source, polling = polled
    seen = {}
    source.actions.append(Action(lambda: seen.setdefault("leader", polling.is_leading()), False))
    assert until(lambda: "leader" in seen)
    polling.submit(lambda: seen.setdefault("pool", polling.is_leading()))
    assert until(lambda: "pool" in seen)
    assert seen == {"leader": True, "pool": False} and not polling.is_leading()


def test_a_wait_ends_with_the_polling():
    polling = Polling(lambda: None, 1, "test")
    polling.start()
    call = Call(0, "x", 0)
    waiting = threading.Thread(target=polling.wait, args=(call, call.deadline))
    waiting.start()
    assert polling.stop(5)
    waiting.join(5)
    assert not waiting.is_alive() and not call.done


def test_a_handler_that_does_not_end_is_told_by_stop():
    source, gate = Source(), threading.Event()
    polling = Polling(source.poll, 1, "test")
    polling.start()
    entered = threading.Event()
    source.actions.append(Action(lambda: (entered.set(), gate.wait(10)), True))
    assert entered.wait(5)
    assert not polling.stop(0.05)
    gate.set()
    assert polling.stop(5)


@pytest.mark.timing
def test_an_idle_poller_sleeps(polled):
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2  # a loose bound on 2 %
