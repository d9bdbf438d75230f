"""Thread pool: a limited number of actions at once, in order; no action is kept; the policy."""

from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest

from mpidist.rpc.threads import pool as pool_module
from mpidist.rpc.threads.pool import CALLBACKS, InlinePolicy, Pool, PoolThread, Task, here
from tests.rpc.limits import soon
from tests.rpc.threads.test_polling import Argument, Crowd


def follow(turn):
    raise AssertionError("nobody asked for it")


@pytest.fixture
def pool():
    made = Pool(2, "test", follow, follow)
    yield made
    assert made.stop(5, lambda: None)
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("mpidist-test")
    ]


def test_what_waits_for_a_place_runs_in_its_order():
    pool = Pool(1, "test", follow, follow)
    gate, ran = threading.Event(), []
    pool.submit(Task(lambda: gate.wait(60)))
    for number in range(20):
        pool.submit(Task(lambda number=number: ran.append(number)))
    assert ran == [] and pool.counts()[2] == 21
    gate.set()
    assert soon(lambda: pool.counts()[2] == 0) and ran == list(range(20))
    assert pool.stop(5, lambda: None)


def test_no_more_run_at_once_than_the_limit(pool):
    crowd = Crowd()
    for _ in range(7):
        pool.submit(crowd.task())
    assert soon(lambda: crowd.running == 2) and pool.is_full() and pool.counts()[2] == 7
    crowd.gate.set()
    assert soon(lambda: pool.counts()[2] == 0) and crowd.ended == 7 and crowd.most == 2
    assert pool.counts()[0] <= 3  # threads are used again


def test_what_does_not_block_runs_beside_the_limit(pool):
    crowd, done = Crowd(), threading.Event()
    for _ in range(3):
        pool.submit(crowd.task())
    pool.submit(Task(done.set, False))
    assert done.wait(60) and crowd.ended == 0 and soon(lambda: pool.counts()[2] == 3)
    crowd.gate.set()
    assert soon(lambda: pool.counts()[2] == 0) and crowd.ended == 3


def test_an_action_that_waits_is_not_counted_until_its_wait_ends(pool):
    gates = [threading.Event() for _ in range(4)]
    entered, counted = [], []

    def nest(number):
        turn = here.thread
        entered.append(number)
        pool.leave(turn)
        gates[number].wait(60)
        pool.enter(turn)
        counted.append(turn.is_counted)

    for number in range(4):
        pool.submit(Task(lambda number=number: nest(number)))
    assert soon(lambda: len(entered) == 4)
    assert soon(lambda: pool.counts()[2] == 0) and not pool.is_full()
    for gate in gates:
        gate.set()
    assert soon(lambda: len(counted) == 4 and pool.counts()[2] == 0) and all(counted)


def test_an_action_that_the_leader_runs_counts_from_when_it_is_found_stuck(pool):
    crowd, stuck = Crowd(), PoolThread()
    pool.enter(stuck)
    for _ in range(3):
        pool.submit(crowd.task())
    assert soon(lambda: crowd.running == 1) and pool.is_full() and pool.counts()[2] == 4
    pool.leave(stuck)
    assert soon(lambda: crowd.running == 2) and not stuck.is_counted
    crowd.gate.set()
    assert soon(lambda: crowd.ended == 3) and crowd.most == 2


def test_nothing_of_an_action_is_kept(pool):
    """Not by the thread that was made for it, nor by one that is idle behind it."""
    for _ in range(3):
        argument = Argument()
        held = weakref.ref(argument)
        pool.submit(Task(lambda argument=argument: None))
        del argument
        assert soon(lambda held=held: held() is None)


def test_a_thread_that_follows_ends_when_others_do():
    turns = []
    pool = Pool(1, "test", turns.append, turns.append)
    pool.submit_follower()
    assert soon(lambda: turns) and not turns[0].is_counted
    pool.submit_leader()
    assert soon(lambda: len(turns) == 2) and not turns[1].is_counted
    done = threading.Event()
    pool.submit(Task(done.set))
    assert done.wait(60) and soon(lambda: pool.counts()[2] == 0)
    assert pool.stop(5, lambda: None)


def test_stop_wakes_followers_and_reports_threads_in_user_code():
    woken, gate, entered = threading.Semaphore(0), threading.Event(), threading.Event()
    pool = Pool(1, "test", lambda turn: woken.acquire(), follow)
    pool.submit_follower()
    pool.submit(Task(lambda: (entered.set(), gate.wait(60))))
    assert entered.wait(60)
    assert not pool.stop(0.05, woken.release)
    gate.set()
    assert pool.stop(5, woken.release)


def test_a_thread_that_stops_the_pool_does_not_wait_for_itself():
    pool = Pool(1, "test", follow, follow)
    stopped = []
    pool.submit(Task(lambda: stopped.append(pool.stop(5, lambda: None))))
    assert soon(lambda: stopped) and stopped == [True]
    assert pool.stop(5, lambda: None)


def submit(pool, actions):
    for action in actions:
        pool.submit(action)


class Completion:
    """An action that completes a call, and another one behind it."""

    lane, may_block = CALLBACKS, True

    def __init__(self, run):
        self.run = run


def test_completions_that_the_threads_have_left_run_at_the_stop_and_requests_do_not():
    pool, ran = Pool(1, "test", follow, follow), []
    gate, entered = threading.Event(), threading.Event()
    pool.submit(Completion(lambda: (entered.set(), gate.wait(60), ran.append("first"))))
    assert entered.wait(60)
    for number in range(3):
        pool.submit(Completion(lambda number=number: ran.append(number)))
        pool.submit(Task(lambda: gate.wait(60)))
        pool.submit(Task(lambda number=number: ran.append(f"request {number}")))
    assert not pool.stop(0.05, lambda: None) and sorted(ran) == [0, 1, 2]
    # One that comes later, as of a thread that polls while it waits for its own call.
    pool.submit(Completion(lambda: ran.append(3)))
    pool.submit(Task(lambda: ran.append("late request")))
    assert ran[3:] == [3]
    gate.set()
    assert pool.stop(5, lambda: None) and ran[4:] == ["first"]


def test_each_completion_runs_once_whichever_thread_stops_the_pool():
    for _ in range(30):
        pool, ran = Pool(2, "test", follow, follow), []
        made = [Completion(partial(ran.append, number)) for number in range(40)]
        threads = [
            threading.Thread(target=submit, args=(pool, part)) for part in (made[:20], made[20:])
        ]
        for thread in threads:
            thread.start()
        pool.stop(5, lambda: None)
        for thread in threads:
            thread.join()
        assert sorted(ran) == list(range(40))


def test_running_times_are_learnt_and_forgotten_slowly():
    policy = InlinePolicy()
    assert not policy.is_quick("f")
    policy.record("f", 1e-5)
    assert policy.is_quick("f") and not policy.is_quick("g")
    policy.record("f", 1.0)
    turns = 0
    while not policy.is_quick("f"):
        policy.record("f", 1e-5)
        turns += 1
    assert 10 < turns < 60


def test_the_policy_keeps_a_limited_number_of_names(monkeypatch):
    monkeypatch.setattr(pool_module, "_MAX_KEYS", 10)
    policy = InlinePolicy()
    for number in range(100):
        policy.record(number, 1e-5)
        assert policy.is_quick(number) and len(policy._seconds) <= 10
