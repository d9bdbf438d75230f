"""Options, names, exceptions on their way, what is quick, calls that wait: the parts that need no second process."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from mpidist.errors import CommTimeout, MpidistError, RemoteError
from mpidist.rpc import RpcBackendOptions, TensorPipeRpcBackendOptions, WorkerInfo, remote_error
from mpidist.rpc.call import Call
from mpidist.rpc.pending import PendingCalls
from mpidist.rpc.polling import NOTHING_LEFT, Action, Polling
from mpidist.rpc.quickness import Quickness, key_of


def test_options():
    options = RpcBackendOptions(
        rpc_timeout=timedelta(seconds=2), device_maps={"w": {0: 1, "cuda:1": "cuda:0"}}, devices=["cuda:2"]
    )
    assert options.rpc_timeout == 2.0 and options.device_maps == {"w": {0: 1, 1: 0}}
    assert [str(device) for device in options.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert TensorPipeRpcBackendOptions is RpcBackendOptions
    for wrong in ({"w": {0: 1, 2: 1}}, {"w": {"cpu": 0}}):
        with pytest.raises(ValueError, match="device"):
            RpcBackendOptions(device_maps=wrong)
    with pytest.raises(ValueError, match="timeout"):
        RpcBackendOptions(rpc_timeout=-1)
    with pytest.raises(ValueError, match="num_worker_threads"):
        RpcBackendOptions(num_worker_threads=0)


def test_names():
    assert repr(WorkerInfo("a-b_c:1", 3)) == "WorkerInfo(id=3, name=a-b_c:1)" and WorkerInfo("a", 1) == WorkerInfo("a", 1)
    for wrong in ("a*", " ", "", "x" * 128):
        with pytest.raises(MpidistError):
            WorkerInfo(wrong, 0)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


class Keeps(Exception):
    def __init__(self, words, number):
        super().__init__(words, number)
        self.number = number


def test_exceptions_keep_type_arguments_and_traceback():
    worker = WorkerInfo("far", 2)
    error = remote_error.rebuilt(remote_error.described(raised(Keeps("words", 3))), worker)
    assert type(error) is Keeps and error.number == 3 and error.__cause__.worker == "far" and "in raised" in str(error.__cause__)

    class Local(Exception):
        pass

    error = remote_error.rebuilt(remote_error.described(raised(Local("here"))), worker)
    assert type(error) is RemoteError and error.rank == 2 and "Local: here" in str(error)


def test_quickness_is_learnt_and_forgotten_slowly():
    known = Quickness()
    assert not known.is_quick("f")
    known.note("f", 1e-5)
    assert known.is_quick("f")
    known.note("f", 1.0)
    turns = 0
    while not known.is_quick("f"):
        known.note("f", 1e-5)
        turns += 1
    assert 10 < turns < 60
    assert key_of(len, ()) == ("builtins", "len") and key_of(Quickness(), ()) is Quickness


def test_pending_calls_time_out_in_any_order():
    pending = PendingCalls()
    calls = [Call(0, "x", seconds) for seconds in (0, 0.02, 100, 0.01)]
    for call in calls:
        call.sequence = pending.next_sequence()
        pending.add(call)
    assert not pending.has_expired()
    time.sleep(0.03)
    assert pending.has_expired() and set(pending.expired()) == {calls[1], calls[3]}
    assert not pending.has_expired() and len(pending) == 2
    assert pending.pop(calls[2].sequence) is calls[2] and pending.pop(calls[2].sequence) is None
    assert pending.taken(lambda call: True) == [calls[0]]
    assert isinstance(calls[1].timed_out(), CommTimeout)


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


def test_an_idle_poller_sleeps(polled):
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2  # a loose bound on 2 % that holds on a busy machine
