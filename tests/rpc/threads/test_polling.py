"""Leader, follower, pool and waiting callers: which thread polls, and which one runs an action."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque

import pytest

from mpidist.errors import MpidistError
from mpidist.rpc.threads import polling as module
from mpidist.rpc.threads.call import Call
from mpidist.rpc.threads.polling import Polling
from mpidist.rpc.threads.pool import HANDLED, Task
from tests.rpc.limits import soon


def sent(timeout_s=0.0, make=Call):
    """Return a call as if its request had been sent: its thread polls for the answer."""
    call = make(0, "x", timeout_s)
    call.sequence = 1
    return call


class Answer:
    """An answer; the thread that waits for its call takes it up, else ``poll`` does."""

    may_block = False

    def __init__(self, call):
        self.call = call

    def run(self):
        self.call.finish()


class Source:
    """Source of a polling thread's actions and answers, filled by the test."""

    def __init__(self):
        self.actions = []
        self.due = []
        self.pollers = set()
        self.at_once = 0
        self.errors = []

    def poll(self, tests):
        self.at_once += 1
        if self.at_once != 1 or tests < 1:  # one thread at a time
            self.errors.append((self.at_once, tests))
        self.pollers.add(threading.current_thread().name)
        found = self.actions.pop(0) if self.actions else None
        if isinstance(found, Answer):
            found.run()
            found = HANDLED
        self.at_once -= 1
        return found

    def poll_answer(self, call, tests):
        self.pollers.add(threading.current_thread().name)
        if not self.actions:
            return None
        if not isinstance(self.actions[0], Answer) or self.actions[0].call is not call:
            return False
        self.actions.pop(0).run()
        return True

    def is_due(self):
        return bool(self.due)

    def do_what_is_due(self):
        self.due.pop()()


class Only(Source):
    """Source whose messages are those that one function finds, for ``poll`` and answers alike."""

    def __init__(self, find):
        super().__init__()
        self.find = find

    def poll(self, tests):
        found = self.find()
        if isinstance(found, Answer):
            found.run()
            return HANDLED
        return found

    def poll_answer(self, call, tests):
        found = self.find()
        if found is None:
            return None
        found.run()
        return call.done


@pytest.fixture
def polled():
    source = Source()
    polling = Polling(source, 2, "test")
    polling.start()
    yield source, polling
    assert polling.stop(5) and not source.errors


def test_a_stuck_leader_is_replaced(polled):
    source, _ = polled
    gate, entered, done = threading.Event(), threading.Event(), threading.Event()
    source.actions.append(Task(lambda: (entered.set(), gate.wait(60))))
    assert entered.wait(60)
    source.actions.append(Task(done.set))
    assert done.wait(60)
    gate.set()


class Crowd:
    """Actions that block at a gate, and how many run at once."""

    def __init__(self):
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.running = self.most = self.ended = 0

    def task(self):
        return Task(self.run)

    def run(self):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.gate.wait(10)
        with self.lock:
            self.running -= 1
            self.ended += 1


def test_no_more_actions_run_at_once_than_the_pool_has_threads(polled):
    """The leader blocks in actions that it runs itself; submitted actions count as well."""
    source, polling = polled
    crowd = Crowd()
    source.actions.extend(crowd.task() for _ in range(6))
    # All have been found, and none is left to the leader that is stuck.
    assert soon(lambda: not source.actions and polling.pool.counts()[2] == 6), polling.pool.counts()
    for _ in range(3):
        polling.pool.submit(crowd.task())
    assert crowd.running == 2 == crowd.most and polling.pool.is_full()
    crowd.gate.set()
    assert soon(lambda: polling.pool.counts()[2] == 0) and crowd.ended == 9 and crowd.most == 2


@pytest.mark.parametrize("may_block", [True, False])
@pytest.mark.parametrize("has_answer", [True, False])
def test_a_waiting_thread_takes_up_its_own_answer_alone(polled, may_block, has_answer):
    """Whatever else arrives runs in the pool, though the waiting thread holds its user's lock."""
    source, polling = polled
    lock, me = threading.Lock(), threading.current_thread().name
    for _ in range(20):
        call, ran_in = sent(60) if has_answer else Call(0, "x", 60), []

        def act(call=call, ran_in=ran_in):
            ran_in.append(threading.current_thread().name)
            with lock:
                pass

        with lock:
            source.actions += [Task(act, may_block), HANDLED, Answer(call)]
            polling.wait(call)
        assert call.done and soon(lambda ran_in=ran_in: ran_in) and ran_in[0] != me
    late = sent(0.05)
    polling.wait(late)
    assert not late.done


def test_a_leader_whose_handler_waits_for_long_is_not_counted_as_running(polled):
    """The leader stops polling after 3 ms and sleeps; the follower finds it in one action."""
    source, polling = polled
    calls = [sent(20) for _ in range(2)]
    begun, ended = [], []
    for call in calls:
        source.actions.append(
            Task(lambda call=call: (begun.append(call), polling.wait(call), ended.append(call)))
        )
    assert soon(lambda: len(begun) == 2 and polling.pool.counts()[2] == 0)
    ran = [threading.Event() for _ in range(4)]
    for event in ran:
        polling.pool.submit(Task(event.set))
    assert all(event.wait(60) for event in ran)
    source.actions.extend(Answer(call) for call in calls)
    assert soon(lambda: len(ended) == 2) and soon(lambda: polling.pool.counts()[2] == 0)


def test_more_handlers_may_wait_than_may_run(polled):
    """Calls nest deeper than the pool has threads: more handlers wait at once than may run."""
    source, polling = polled
    calls = [sent(20) for _ in range(5)]
    entered, left = [], []

    def wait_for(call):
        entered.append(call)
        polling.wait(call)
        left.append(call.done)

    source.actions.extend(Task(lambda call=call: wait_for(call)) for call in calls)
    assert soon(lambda: len(entered) == 5), len(entered)
    assert left == []
    source.actions.extend(Answer(call) for call in calls)
    assert soon(lambda: left == [True] * 5), left
    assert soon(lambda: polling.pool.counts()[2] == 0)


class Patient(Call):
    """A call whose thread sleeps until it is woken, without a timeout."""

    __slots__ = ()

    def park(self, timeout_s, *more):
        super().park(60, *more)


@pytest.mark.parametrize("seed", range(4))
def test_a_caller_promotes_the_next_without_a_follower(monkeypatch, seed):
    """One of many waiting threads polls; when its own answer arrives it promotes the next.

    The pool has no threads here.
    """
    monkeypatch.setattr(module, "_CALLER_POLLS_S", 60)  # a leading caller keeps the lead
    rng = random.Random(seed)
    waiting, ended, lock = [], [], threading.Lock()

    def find():
        with lock:
            if not waiting or rng.random() < 0.3:
                return None
            call = waiting.pop(rng.randrange(len(waiting)))
            # The answers to others' calls are taken up as well: there are no other threads.
            return Task(call.finish, False)

    source = Only(find)
    source.poll_answer = lambda call, tests: (one := find()) and (one.run() or call.done or None)
    polling = Polling(source, 2, "test")

    def call_often():
        for _ in range(50):
            call = sent(make=Patient)
            with lock:
                waiting.append(call)
            polling.wait(call)
            ended.append(call.done)

    threads = [threading.Thread(target=call_often, daemon=True) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended == [True] * 16 * 50
    assert not polling.parked and polling.leader is None


class Interrupted(deque):
    """The parked calls; another thread runs between an append and the next statement."""

    def __init__(self, polling, meanwhile):
        super().__init__()
        self.polling = polling
        self.meanwhile = meanwhile

    def append(self, call):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile == "ends before":
            self.polling.leader = None  # before any call is parked, so none is promoted
        super().append(call)
        if meanwhile == "promotes":
            self.polling.leader = None
            self.polling.promote()


@pytest.mark.parametrize("meanwhile", ["ends before", "promotes"])
def test_a_lead_that_is_freed_while_a_thread_goes_to_sleep_is_not_lost(meanwhile):
    call = sent(make=Patient)
    polling = Polling(Only(lambda: Answer(call)), 1, "test")
    polling.parked = Interrupted(polling, meanwhile)
    polling.leader = Call(1, "another that polls", 0)
    thread = threading.Thread(target=polling.wait, args=(call,), daemon=True)
    thread.start()
    thread.join(60)
    assert call.done and polling.leader is None


def test_a_promoted_thread_that_has_its_answer_promotes_another():
    """Promotion and answer wake the thread at the same time; another parked thread must lead."""
    first, second = sent(make=Patient), sent(make=Patient)
    polling = Polling(Only(lambda: Answer(second)), 1, "test")
    polling.leader = leader = Call(1, "another that polls", 0)
    threads = [
        threading.Thread(target=polling.wait, args=(one,), daemon=True) for one in (first, second)
    ]
    for count, thread in enumerate(threads, 1):
        thread.start()
        assert soon(lambda count=count: len(polling.parked) == count)
    assert soon(lambda: first.latches and second.latches)
    polling.parked.remove(first)  # promoted
    assert polling.leader is leader
    polling.leader = None
    first.finish()  # its answer arrives before the thread runs
    for thread in threads:
        thread.join(60)
    assert first.done and second.done


def test_many_threads_wait_while_the_pool_polls_too(polled):
    source, polling = polled
    rng, calls = random.Random(1), []

    def wait_often():
        for _ in range(20):
            calls.append(call := sent(20))
            polling.wait(call)

    threads = [threading.Thread(target=wait_often) for _ in range(16)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if calls:
            source.actions.append(Answer(calls.pop(rng.randrange(len(calls)))))
        time.sleep(0)
    assert not calls and soon(lambda: not source.actions)


def test_what_is_due_is_done_while_a_caller_leads(polled, monkeypatch):
    source, polling = polled
    monkeypatch.setattr(module, "_CALLER_POLLS_S", 60)
    call = sent(60)
    source.due.append(lambda: source.actions.append(Answer(call)))
    polling.wait(call)
    assert call.done and not source.due


def test_a_lead_that_an_exception_has_lost_is_taken(polled):
    """The exception of a signal's handler may leave the lead with a call that nobody waits for."""
    source, polling = polled
    polling.leader = sent()
    done = threading.Event()
    source.actions.append(Task(done.set))
    assert done.wait(60)


def test_a_call_within_a_poll_of_its_thread(polled, monkeypatch):
    """A signal's handler or a finalizer calls while its thread polls for an answer."""
    source, polling = polled
    monkeypatch.setattr(module, "_CALLER_POLLS_S", 60)
    inner, outer, ran_in = sent(60), sent(60), []
    poll_answer = source.poll_answer

    def interrupted(call, tests):
        source.poll_answer = poll_answer
        source.actions += [
            Task(lambda: ran_in.append(threading.current_thread().name), False),
            Answer(inner),
        ]
        polling.wait(inner)
        source.actions.append(Answer(outer))
        return None

    source.poll_answer = interrupted
    polling.wait(outer)
    assert inner.done and outer.done
    assert soon(lambda: ran_in) and ran_in[0] != threading.current_thread().name


def test_a_call_within_the_taking_up_of_a_message_is_refused(polled):
    """A finalizer that runs where a pool thread takes up messages for all cannot wait there."""
    source, polling = polled
    errors = []

    def finalize():
        try:
            polling.wait(sent(60))
        except MpidistError as error:
            errors.append(str(error))

    class Finalized:
        def run(self):
            finalize()

    poll = source.poll

    def taking(tests):
        source.poll = poll
        Finalized().run()
        return HANDLED

    source.poll = taking
    assert soon(lambda: errors) and "finalizer" in errors[0]


def test_a_thread_knows_whether_it_leads(polled):
    source, polling = polled
    seen = {}
    source.actions.append(Task(lambda: seen.setdefault("leader", polling.is_leading()), False))
    assert soon(lambda: "leader" in seen)
    polling.pool.submit(Task(lambda: seen.setdefault("pool", polling.is_leading())))
    assert soon(lambda: "pool" in seen)
    assert seen == {"leader": True, "pool": False} and not polling.is_leading()


class Argument:
    """What an action holds."""


def test_what_an_action_holds_is_free_as_soon_as_it_has_run(polled):
    """For actions run by the leader, by a waiting caller, and by the pool."""
    source, polling = polled
    ran = []

    def run(may_block, give):
        argument = Argument()
        held = weakref.ref(argument)
        give(Task(lambda: ran.append(type(argument)), may_block))
        return held

    def wait_with(action):
        call = sent(5)
        source.actions += [action, Answer(call)]
        del action
        polling.wait(call)

    for may_block in (False, True):
        for give in (source.actions.append, polling.pool.submit, wait_with):
            held = run(may_block, give)
            assert soon(lambda held=held: held() is None)
    assert ran == [Argument] * 6


def test_a_wait_ends_with_the_polling():
    polling = Polling(Only(lambda: None), 1, "test")
    polling.start()
    call = sent()
    waiting = threading.Thread(target=polling.wait, args=(call,))
    waiting.start()
    assert polling.stop(5)
    waiting.join(60)
    assert not waiting.is_alive() and not call.done


def test_stop_reports_a_handler_that_does_not_end():
    source, gate = Source(), threading.Event()
    polling = Polling(source, 1, "test")
    polling.start()
    entered = threading.Event()
    source.actions.append(Task(lambda: (entered.set(), gate.wait(60))))
    assert entered.wait(60)
    assert not polling.stop(0.05)
    gate.set()
    assert polling.stop(5)


def test_a_poller_without_messages_needs_no_clock_after_a_while(polled):
    """The follower sleeps until it is woken; a stuck leader is replaced even then."""
    source, polling = polled
    assert soon(lambda: polling.is_follower_asleep)
    gate, entered, done = threading.Event(), threading.Event(), threading.Event()
    source.actions.append(Task(lambda: (entered.set(), gate.wait(60))))
    assert entered.wait(60)
    source.actions.append(Task(done.set))
    assert done.wait(60)
    gate.set()


@pytest.mark.timing
def test_an_idle_poller_sleeps(polled):
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2  # a loose bound on 2 %
