"""Pending calls: registered before sending, completed by one thread, failed for each reason."""

from __future__ import annotations

import itertools
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from mpidist.errors import CommTimeout, FrameError, MpidistError, RankFailureError
from mpidist.rpc.calls import pending as pending_module
from mpidist.rpc.calls.pending import PendingCalls
from mpidist.rpc.calls.references import References
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.message import Kind
from mpidist.rpc.threads import call as call_module
from mpidist.rpc.threads.call import AsyncCall, Call
from mpidist.rpc.threads.pool import HANDLED
from mpidist.rpc.values import remote_error
from mpidist.rpc.values.codec import EMPTY
from mpidist.rpc.worker import WorkerInfo, Workers

DEFAULT_S = 7.0


class Wire:
    """Records messages; may raise, or deliver the answer immediately."""

    def __init__(self):
        self.sent = []
        self.refusal = None
        self.data_only = [None] * 4
        self.on_post = lambda sequence: None

    def post(self, to, kind, sequence=0, context=0, prefix=b"", content=EMPTY):
        if self.refusal is not None:
            raise self.refusal
        self.sent.append((to, kind, sequence))
        self.on_post(sequence)

    def decode_answer(self, incoming):
        return incoming.value


class Polling:
    """Polls no messages: a test defines what happens while a thread waits."""

    def __init__(self):
        self.meanwhile = lambda call: None
        self.submitted = []
        self.pool = self
        self.helped = 0

    def submit(self, action):
        """Run what counts toward no limit at once, in place of a thread."""
        self.submitted.append(action)
        if not action.may_block:
            action.run()

    def wait(self, call):
        self.meanwhile(call)

    def note_call(self):
        self.helped += 1

    def summon(self):
        self.helped += 1


@pytest.fixture
def clock(monkeypatch):
    """Return a list with one number: the time of the modules' clock, in seconds."""
    now = [1000.0]
    for module in (call_module, pending_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def calls(clock, monkeypatch):
    monkeypatch.setattr(pending_module, "_numbers", itertools.count())
    workers = Workers([WorkerInfo(f"worker{rank}", rank) for rank in range(3)], 0, [10, 11, 12])
    wire, polling, dropped = Wire(), Polling(), []
    made = PendingCalls(workers, wire, wire, polling, DEFAULT_S, (), None, dropped.append)
    made.wire, made.polling, made.dropped, made.workers = wire, polling, dropped, workers
    made.references = References(workers, wire, wire, made, polling, None)
    return made


def started(calls, to=1, timeout_s=0.0, text="x"):
    call = Call(to, text, timeout_s)
    calls.start(call, Kind.CALL_PYTHON, b"", EMPTY)
    return call


def answer(call_or_sequence, value=None, kind=Kind.RESULT, source=1):
    sequence = getattr(call_or_sequence, "sequence", call_or_sequence)
    return SimpleNamespace(sequence=sequence, kind=kind, value=value, source=source)


def test_every_request_has_a_number_of_its_own_and_is_registered_before_it_is_sent(calls):
    seen = []
    calls.wire.on_post = lambda sequence: seen.append((sequence, len(calls)))
    made = [started(calls) for _ in range(3)]
    assert [call.sequence for call in made] == [1, 2, 3] and seen == [(1, 1), (2, 2), (3, 3)]
    assert calls.started == 3 and calls.creations() == 0


def test_no_two_agents_of_a_process_give_a_number_twice(calls):
    """The recorder's entries of both may be in one trace."""
    wire, polling = Wire(), Polling()
    other = PendingCalls(calls.workers, wire, wire, polling, DEFAULT_S, (), None, None)
    numbers = [started(one).sequence for one in (calls, other, calls)]
    assert sorted(set(numbers)) == numbers and calls.started == numbers[-1]


def test_pending_calls_time_out_in_any_order(calls, clock):
    made = [
        started(calls, timeout_s=timeout_s, text=f"call {timeout_s}")
        for timeout_s in (0, 2, 100, 1)
    ]
    calls.expire()
    assert not any(call.done for call in made) and not calls.has_expired()
    clock[0] += 1.5
    assert calls.has_expired()
    calls.expire()
    assert [call.done for call in made] == [False, False, False, True] and not calls.has_expired()
    clock[0] += 1.5
    assert calls.has_expired()
    calls.expire()
    assert (
        [call.done for call in made] == [False, True, False, True]
        and not calls.has_expired()
        and len(calls) == 2
    )
    with pytest.raises(CommTimeout, match=r"RPC ran for more than set timeout \(2000 ms\).*call 2"):
        calls.result(made[1])
    assert (
        calls.complete(answer(made[2], "late enough")) is HANDLED
        and calls.result(made[2]) == "late enough"
    )
    clock[0] += 1e9
    calls.expire()
    assert not made[0].done and len(calls) == 1  # no timeout
    nearer = started(calls, timeout_s=1)
    clock[0] += 2
    assert calls.has_expired()
    calls.expire()
    assert nearer.done


def times_out(calls, clock, call):
    """Return whether a look at what is due fails a call once its time is over."""
    clock[0] = float(call.deadline)
    if calls.has_expired():
        calls.expire()
    return call.done


def test_a_call_that_starts_during_a_search_times_out(calls, clock, monkeypatch):
    made = []

    def slow(*args, **kwargs):
        found = min(*args, **kwargs)
        if len(made) < 5:
            made.append(started(calls, timeout_s=5 - len(made)))
        return found

    monkeypatch.setattr(pending_module, "min", slow, raising=False)
    started(calls, timeout_s=1)
    clock[0] += 2
    assert calls.has_expired()
    calls.expire()
    assert made and not made[0].done
    monkeypatch.undo()
    monkeypatch.setattr(call_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pending_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert all(times_out(calls, clock, one) for one in reversed(made))


def test_a_call_that_starts_while_another_compares_its_deadline_times_out(calls, clock):
    made = []

    class Slow(float):
        def __lt__(self, other):
            is_less = float(self) < other
            if not made:
                made.append(started(calls, timeout_s=1))
            return is_less

    late = Call(1, "late", 0)
    late.deadline = Slow(clock[0] + 60)
    calls.start(late, Kind.CALL_PYTHON, b"", EMPTY)
    assert times_out(calls, clock, made[0]) and not late.done
    assert times_out(calls, clock, late)


def test_a_search_within_a_search_keeps_what_it_finds(calls, clock):
    """As of a signal's handler that makes a call and waits for it."""
    made = []

    class Interrupted(float):
        def __gt__(self, other):
            if not made:
                made.append(started(calls, timeout_s=1))
                calls.expire()
            return float(self) > other

    late = Call(1, "late", 0)
    calls.start(late, Kind.CALL_PYTHON, b"", EMPTY)
    late.deadline = Interrupted(clock[0] + 60)
    calls.expire()
    assert times_out(calls, clock, made[0]) and times_out(calls, clock, late)


def test_a_thread_whose_wait_is_over_fails_its_call_by_itself(calls, clock):
    call = started(calls, timeout_s=3)
    calls.polling.meanwhile = lambda call: clock.__setitem__(0, clock[0] + 4)
    with pytest.raises(CommTimeout):
        calls.result(call)
    assert len(calls) == 0


@pytest.mark.parametrize(
    ("timeout", "expected"), [(UNSET_RPC_TIMEOUT, DEFAULT_S), (0, 0.0), (2.5, 2.5)]
)
def test_timeouts_of_calls_and_requests(calls, timeout, expected):
    seen = []

    def meanwhile(call):
        seen.append(call.timeout_s)
        calls.complete(answer(call, 5)).run()

    calls.polling.meanwhile = meanwhile
    assert calls.invoke(1, len, ((),), {}, timeout) == 5
    assert calls.request(1, Kind.RREF_FETCH, b"", None, timeout, "a fetch") == 5
    calls.invoke_async(1, len, ((),), {}, timeout).wait()
    assert seen == [expected] * 2 + [expected] and calls.polling.helped == 1


def test_each_call_is_taken_by_one_thread_alone(calls):
    ended = []

    class Counting(Call):
        def finish(self):
            ended.append(self.sequence)
            super().finish()

    for _ in range(400):
        calls.start(Counting(1, "x", 0), Kind.CALL_PYTHON, b"", EMPTY)
    start = threading.Barrier(4)

    def take(how):
        start.wait(60)
        for sequence in range(1, 401):
            how(sequence)

    ways = [
        lambda sequence: calls.complete(answer(sequence)),
        lambda sequence: calls.complete(answer(sequence)),
        lambda sequence: calls.fail(sequence, ValueError(), 1),
        lambda sequence: calls.fail_to(1) if sequence % 100 == 50 else None,
    ]
    threads = [threading.Thread(target=take, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == list(range(1, 401)) and len(calls) == 0
    assert all(one.kind == Kind.RESULT for one in calls.dropped)


def test_a_failure_to_send_leaves_nothing_registered(calls):
    calls.wire.refusal = ValueError("cannot be sent")
    store = calls.references.store
    ways = [
        lambda: calls.invoke(1, len, ((),), {}, 1.0),
        lambda: calls.invoke_async(1, len, ((),), {}, 1.0),
        lambda: calls.request(1, Kind.RREF_FETCH, b"", None, 1.0, "a fetch"),
        lambda: calls.references.create(1, len, ((),), {}, 1.0),
        lambda: calls.references.create(0, len, ((),), {}, 1.0),
    ]
    for way in ways:
        with pytest.raises(ValueError, match="cannot be sent"):
            way()
        assert len(calls) == 0 and calls.creations() == 0 and store.counts() == (0, 0)
        assert calls.unfinished() == 0
    assert calls.polling.helped == 0


def test_what_cannot_be_pickled_leaves_nothing_registered(calls):
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("not this one")

    for way in (calls.invoke, calls.invoke_async, calls.references.create):
        with pytest.raises(RuntimeError, match="not this one"):
            way(0, len, (Stubborn(),), {}, 1.0)
    assert (
        len(calls) == 0
        and calls.started == 0
        and calls.references.store.counts() == (0, 0)
        and not calls.wire.sent
    )


def test_calls_to_a_worker_that_has_left_fail(calls):
    to_gone, to_other = started(calls, 1), started(calls, 2)
    future = calls.invoke_async(1, len, ((),), {}, 0)
    calls.workers.left.add(1)
    calls.fail_to(1)
    assert to_gone.done and not to_other.done and len(calls) == 1
    with pytest.raises(RankFailureError, match=r"x: worker1 has left RPC") as caught:
        calls.result(to_gone)
    assert caught.value.ranks == (11,)
    with pytest.raises(RankFailureError, match=r"len on worker1: worker1 has left"):
        future.wait()
    sent = len(calls.wire.sent)
    with pytest.raises(RankFailureError, match="worker1 has left"):
        calls.invoke(1, len, ((),), {}, 0)
    assert len(calls.wire.sent) == sent and len(calls) == 1  # nothing was sent


def test_a_worker_that_leaves_while_a_call_is_sent_fails_it(calls):
    def leave(sequence):
        calls.workers.left.add(1)
        calls.fail_to(1)

    calls.wire.on_post = leave
    call = started(calls, 1)
    assert call.done and len(calls) == 0
    with pytest.raises(RankFailureError):
        calls.result(call)


def test_stop_fails_what_is_under_way_and_refuses_the_rest(calls):
    call, future = started(calls), calls.invoke_async(1, len, ((),), {}, 0)
    callbacks = []
    future.add_done_callback(callbacks.append)
    calls.stop()
    # the pool ends as well
    assert len(calls) == 0 and len(callbacks) == 1 and not calls.polling.submitted
    assert calls.unfinished() == 0
    with pytest.raises(MpidistError, match="RPC was shut down on this worker"):
        calls.result(call)
    with pytest.raises(MpidistError, match="RPC was shut down"):
        future.wait()
    with pytest.raises(MpidistError, match="RPC was shut down; len on worker1 cannot be sent"):
        calls.invoke(1, len, ((),), {}, 0)


def test_a_stop_while_a_call_is_sent_or_waited_for_fails_it(calls):
    calls.wire.on_post = lambda sequence: calls.stop()
    call = started(calls)
    with pytest.raises(MpidistError, match="x: RPC was shut down on this worker"):
        calls.result(call)
    calls.is_stopped, calls.wire.on_post = False, lambda sequence: None
    call = started(calls)
    calls.polling.meanwhile = lambda call: setattr(calls, "is_stopped", True)
    with pytest.raises(MpidistError, match="RPC was shut down before x was answered"):
        calls.result(call)
    assert len(calls) == 0


def test_late_answers_are_dropped(calls, clock):
    call = started(calls, timeout_s=1)
    clock[0] += 2
    calls.expire()
    late = answer(call, "late")
    assert calls.complete(late) is HANDLED and calls.dropped == [late]
    with pytest.raises(CommTimeout):
        calls.result(call)
    assert calls.complete(answer(999)) is HANDLED and len(calls.dropped) == 2


def test_an_error_is_rebuilt_with_its_worker(calls):
    calls._unpickler = pickle.Unpickler
    call = started(calls, 2)
    calls.complete(answer(call, remote_error.describe(KeyError("missing")), Kind.EXCEPTION, 2))
    with pytest.raises(KeyError, match="missing") as caught:
        calls.result(call)
    assert caught.value.__cause__.worker == "worker2"


def test_a_future_is_completed_by_an_action(calls):
    """Also one without callbacks of Python: C++ may have some."""
    plain, with_callback = (calls.invoke_async(1, len, ((),), {}, 0) for _ in range(2))
    seen = []
    chained = with_callback.then(lambda future: seen.append(future.value()) or "chained")
    action = calls.complete(answer(1, 5))
    assert isinstance(action, AsyncCall) and not action.may_block
    action.run()
    assert plain.done() and plain.value() == 5 and plain.call is None and action.future is None
    action = calls.complete(answer(2, 6))
    assert action.may_block and not with_callback.done()
    action.run()
    assert seen == [6] and chained.wait() == "chained"
    action.run()  # again does nothing
    lost = calls.invoke_async(1, len, ((),), {}, 0)
    calls.fail(3, ValueError("lost"), 1)
    assert lost.done() and len(calls.polling.submitted) == 1
    failing = calls.invoke_async(1, len, ((),), {}, 0)
    failing.add_done_callback(lambda future: None)
    calls.fail(4, ValueError("lost"), 1)
    _, action = calls.polling.submitted
    assert not failing.done()
    action.run()
    with pytest.raises(ValueError, match="lost"):
        failing.wait()


@pytest.mark.parametrize("way", ["async", "remote"])
def test_a_call_has_ended_when_its_callbacks_have(calls, way):
    seen = []
    if way == "async":
        future = calls.invoke_async(1, len, ((),), {}, 0)
    else:
        future = calls.references.create(1, len, ((),), {}, 0)[3].future()
    future.add_done_callback(lambda _: seen.append(calls.unfinished()))
    action = calls.complete(answer(1, 5, Kind.REMOTE_DONE if way == "remote" else Kind.RESULT))
    assert len(calls) == 0 and calls.unfinished() == 1
    action.run()
    assert seen == [1] and calls.unfinished() == 0
    # Without a callback, or a future.
    calls.references.create(1, len, ((),), {}, 0)
    assert calls.unfinished() > 0
    calls.complete(answer(2, kind=Kind.REMOTE_DONE))
    assert calls.unfinished() == 0


def test_nobody_but_the_callee_answers_or_fails_a_call(calls):
    call = started(calls)
    with pytest.raises(FrameError, match="rank 2 has answered x"):
        calls.complete(answer(call, "another's", source=2))
    calls.fail(call.sequence, ValueError("another's"), 2)
    assert not call.done and len(calls) == 1
    calls.complete(answer(call, "its own"))
    assert calls.result(call) == "its own" and not len(calls)


def test_creations_are_counted_until_the_owner_has_answered(calls, clock):
    store = calls.references.store
    reference, fork, entry, creation = calls.references.create(0, len, ((),), {}, 5.0)
    assert calls.creations() == 1 and set(entry.forks) == {fork} and entry.reference == reference
    _, _, none, elsewhere = calls.references.create(1, torch.ones, (2,), {}, 5.0)
    assert none is None and calls.creations() == 2 == len(calls)
    entry.set(0)
    calls.complete(answer(creation, kind=Kind.REMOTE_DONE, source=0))
    assert (
        creation.done
        and creation.reason() is None
        and not creation.is_lost
        and store.counts() == (0, 0)
    )
    clock[0] += 6
    calls.expire()
    assert elsewhere.is_lost and calls.creations() == 0
    with pytest.raises(CommTimeout, match=r"remote torch[.]ones on worker1"):
        elsewhere.future().wait()


def test_a_creation_is_confirmed_unless_an_action_follows(calls):
    _, _, _, plain = calls.references.create(1, len, ((),), {}, 5.0)
    _, _, _, awaited = calls.references.create(1, len, ((),), {}, 5.0)
    future = awaited.future()
    stranger = answer(plain, kind=Kind.REMOTE_DONE, source=2)
    assert not calls.confirm(stranger) and not plain.done
    assert calls.confirm(answer(plain, kind=Kind.REMOTE_DONE)) and plain.done
    assert not calls.confirm(answer(plain, kind=Kind.REMOTE_DONE))  # it is over
    arrived = answer(awaited, kind=Kind.REMOTE_DONE)
    assert not calls.confirm(arrived) and not awaited.done and len(calls) == 1
    calls.complete(arrived).run()
    assert future.done() and plain.future().done() and not len(calls)
    call = started(calls)
    assert not calls.confirm(answer(call)) and not call.done


def open_calls(calls, count):
    for _ in range(count):
        started(calls, timeout_s=0)
        calls.pace()


@pytest.fixture
def paced(calls, monkeypatch):
    """Return calls of a worker that answers the oldest call in each poll, or never."""
    now = [0.0]

    def monotonic():
        now[0] += 1e-3
        return now[0]

    clock = SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(pending_module, "time", clock)
    calls.most = 0

    def summon():
        calls.polling.helped += 1
        calls.most = max(calls.most, len(calls))
        if calls.answers:
            calls.complete(answer(next(iter(calls._pending))))

    calls.polling.summon = summon
    calls.answers = True
    return calls


def test_a_thread_that_issues_many_calls_lets_them_be_answered(paced):
    many = pending_module._MANY
    open_calls(paced, many - 1)
    assert paced.polling.helped == 0
    open_calls(paced, 20 * many)
    assert paced.most == many and paced.polling.helped > 10 * many


def test_a_worker_that_answers_nothing_delays_a_thread_after_so_many_calls_each(paced):
    many, paced.answers = pending_module._MANY, False
    open_calls(paced, 16 * many)
    # 20 ms each time.
    assert len(paced) == 16 * many and 16 * 10 < paced.polling.helped < 16 * 30
    # Once they are answered, the next ones are held back as before.
    paced.answers = True
    while len(paced) > many // 4:
        paced.polling.summon()
    paced.most = 0
    open_calls(paced, 2 * many)
    assert paced.most == many


def test_a_handler_that_issues_many_calls_does_not_wait(paced, monkeypatch):
    monkeypatch.setattr(pending_module, "here", SimpleNamespace(thread=object()))
    open_calls(paced, 2 * pending_module._MANY)
    assert paced.polling.helped == 0


def test_calls_that_are_stopped_are_not_waited_for(paced):
    paced.answers = False
    open_calls(paced, pending_module._MANY - 1)
    paced.polling.summon = paced.stop
    open_calls(paced, 1)
    assert len(paced) == 0
