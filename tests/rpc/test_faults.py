"""Regressions: messages of thousands of parts, failures in transit, leaks, forks, ends."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import operator
import os
import select
import signal
import sys
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mpidist.rpc as rpc
from mpidist.errors import CommTimeout, MpidistError, RankFailureError, RemoteError, RRefError
from mpidist.rpc import api, message
from mpidist.rpc.threads.call import Creation
from tests.rpc.limits import CALL_S, joined, limit_of_tests, shut_down, soon
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)
_TEST_S = 100  # a test that takes longer hangs


_limit = limit_of_tests(_TEST_S)


def echo(x=None):
    return x


def call(to, function, *args):
    """Call with a time limit, so that a pending call fails with its name."""
    return rpc.rpc_sync(to, function, args=args, timeout=CALL_S)


def still_answers(to):
    return call(to, echo, 5) == 5


# Messages of thousands of parts.


def small_arrays():
    return [np.arange(number, number + 3) for number in range(5000)]


def large_arrays():
    return [np.full(17 << 10, number % 251, dtype=np.uint8) for number in range(2100)]


def large_tensors():
    return [torch.full((17 << 8,), float(number)) for number in range(2100)]


def views_apart():
    whole = torch.arange(25_000)
    return [whole[start : start + 2] for start in range(0, 25_000, 5)]


def views_side_by_side():
    return list(torch.arange(10_000).split(2))


def views_of_rows():
    return list(torch.arange(4200 * 8.0).view(4200, 8)[:, 2:5])


def small_tensors():
    return [torch.tensor([number, -number]) for number in range(5000)]


def mixed_parts():
    return [*small_arrays(), *views_apart(), *large_tensors()[:200], *large_arrays()[:200]]


_MANY = [
    small_arrays,
    large_arrays,
    large_tensors,
    views_apart,
    views_side_by_side,
    views_of_rows,
    small_tensors,
    mixed_parts,
]


def differing(name, found):
    """Places at which a list of arrays is not what the function of this name makes."""
    expected = globals()[name]()
    assert len(found) == len(expected)
    pairs = enumerate(zip(found, expected, strict=True))
    return [
        place
        for place, (a, b) in pairs
        if type(a) is not type(b) or a.dtype != b.dtype or not np.array_equal(a, b)
    ]


@pytest.mark.parametrize("made", _MANY, ids=operator.attrgetter("__name__"))
def test_any_number_of_arrays_goes_and_comes(workers, to, made):
    assert call(to, differing, made.__name__, made()) == []  # as an argument
    assert differing(made.__name__, call(to, made)) == []  # as an answer
    kept = rpc.remote(to, made, timeout=CALL_S)
    assert differing(made.__name__, kept.to_here(timeout=CALL_S)) == []
    assert still_answers(to)


def make_references(count):
    return [rpc.RRef(number) for number in range(count)]


def local_values(rrefs):
    return [rref.local_value() for rref in rrefs]


def test_thousands_of_references_go_and_come(group, workers, to):
    mine = make_references(5000)
    back = call(to, echo, mine)
    assert local_values(back) == list(range(5000))
    theirs = call(to, make_references, 5000)
    assert [theirs[place].to_here(timeout=CALL_S) for place in (0, 63, 64, 4999)] == [
        0,
        63,
        64,
        4999,
    ]
    assert call(to, local_values, theirs) == list(range(5000))
    third = workers[(group.rank + 2) % group.size]
    held = rpc.remote(third, echo, args=(theirs[:500],), timeout=CALL_S)  # user to user
    assert call(to, local_values, held.to_here(timeout=CALL_S)) == list(range(500))


# Failures on the way.


class FailsToPickle:
    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        raise self.kind("does not travel")


class FailsToUnpickle:
    def __init__(self, kind):
        self.kind = kind

    def __getstate__(self):
        return {"kind": self.kind}

    def __setstate__(self, state):
        raise state["kind"]("does not arrive")


class Untold(Exception):
    """An exception that raises SystemExit when it is pickled or formatted."""

    def __reduce__(self):
        raise SystemExit("not even as an error")

    def __str__(self):
        raise KeyboardInterrupt("no text")


def make(kind, *args):
    return kind(*args)


def fail(kind, *args):
    raise kind(*args)


def deep_list():
    made = []
    for _ in range(200_000):
        made = [made]
    return made


def lock_in_a_list():
    return [1, {"lock": threading.Lock()}]


def deleted_reference():
    rref = rpc.RRef(1)
    rref = rpc.rpc_sync(rpc.get_worker_info(), echo, args=(rref,))
    other = rpc.remote(api._get_current_rpc_agent().get_worker_infos()[-1], echo, args=(1,))
    if other.is_owner():
        raise ValueError("no user here")
    other.delete()
    return [rref, other]


_BAD_ANSWERS = {
    "lock": ((threading.Lock,), TypeError),
    "lock within": ((lock_in_a_list,), TypeError),
    "raises ValueError": ((make, FailsToPickle, ValueError), ValueError),
    "raises MemoryError": ((make, FailsToPickle, MemoryError), MemoryError),
    "raises SystemExit": ((make, FailsToPickle, SystemExit), RemoteError),
    "raises KeyboardInterrupt": ((make, FailsToPickle, KeyboardInterrupt), RemoteError),
    "too deep": ((deep_list,), RecursionError),
    "an error without words": ((fail, Untold), RemoteError),
    "does not arrive": ((make, FailsToUnpickle, ValueError), ValueError),
    "deleted reference": ((deleted_reference,), (MpidistError, ValueError)),
}


@pytest.mark.parametrize("case", _BAD_ANSWERS)
def test_an_answer_that_cannot_be_sent_fails_its_call_alone(workers, to, case):
    (function, *args), error = _BAD_ANSWERS[case]
    meanwhile = rpc.rpc_async(to, time.sleep, args=(0.05,), timeout=CALL_S)
    with pytest.raises(error):
        call(to, function, *args)
    with pytest.raises(error):
        rpc.rpc_async(to, function, args=tuple(args), timeout=CALL_S).wait()
    kept = rpc.remote(to, function, args=tuple(args), timeout=CALL_S)
    if not kept.is_owner():
        with pytest.raises(error):
            kept.to_here(timeout=CALL_S)
    assert meanwhile.wait() is None
    assert still_answers(to)


_BAD_ARGUMENTS = {
    "raises ValueError": ((FailsToPickle, ValueError), ValueError),
    "raises MemoryError": ((FailsToPickle, MemoryError), MemoryError),
    "raises SystemExit": ((FailsToPickle, SystemExit), SystemExit),
    "raises KeyboardInterrupt": ((FailsToPickle, KeyboardInterrupt), KeyboardInterrupt),
    "does not arrive": ((FailsToUnpickle, ValueError), ValueError),
    "does not arrive: SystemExit": ((FailsToUnpickle, SystemExit), RemoteError),
    "too deep": ((deep_list,), RecursionError),
}


def sent_with(to, argument):
    """Ways to send an argument; each returns the result or raises the error."""
    return [
        lambda: rpc.rpc_sync(to, echo, args=(argument,), timeout=CALL_S),
        lambda: rpc.rpc_async(to, echo, kwargs={"x": argument}, timeout=CALL_S).wait(),
        lambda: rpc.remote(to, echo, args=([argument, torch.ones(9000)],), timeout=CALL_S).to_here(
            timeout=CALL_S
        ),
    ]


@pytest.mark.parametrize("case", _BAD_ARGUMENTS)
def test_an_argument_that_cannot_be_sent_fails_its_call_alone(workers, to, case):
    (kind, *given), error = _BAD_ARGUMENTS[case]
    argument = kind(*given)
    for send in sent_with(to, argument):
        with pytest.raises(error):
            send()
    assert still_answers(to)


def meta_tensor():
    return torch.empty(3, 4, device="meta")


def test_a_tensor_without_memory_arrives_or_fails_its_call_alone(workers, to):
    sends = [
        *sent_with(to, meta_tensor()),
        lambda: call(to, meta_tensor),
        lambda: call(to, echo, [meta_tensor(), np.ones(3)]),
    ]
    for send in sends:
        with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):
            found = send()
            found = found[0] if isinstance(found, list) else found
            assert found.device.type == "meta" and found.shape == (3, 4)
    assert still_answers(to)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_remote_interrupt_is_a_remote_error_with_the_reason(workers, to, kind):
    rref = rpc.remote(to, fail, args=(kind, "stop it"))
    for use in (
        lambda: call(to, fail, kind, "stop it"),
        lambda: rref.rpc_sync(timeout=CALL_S).anything(),
    ):
        with pytest.raises(RemoteError) as caught:
            use()
        text = str(caught.value)
        assert (
            kind.__name__ in text and "stop it" in text and caught.value.type_name == kind.__name__
        )
        assert "cannot be pickled" not in text and "rebuilding it raised" not in text
    assert still_answers(to)


# What the threads keep.

_living: weakref.WeakSet[Tracked] = weakref.WeakSet()


class Tracked:
    """An object that is counted where it has arrived."""

    def __init__(self):
        self.ballast = bytes(100_000)

    def __setstate__(self, state):
        self.__dict__.update(state)
        _living.add(self)

    def rest(self, other):
        time.sleep(3e-3)
        return other is not None


def rest(*args):
    time.sleep(3e-3)
    return len(args)


def rest_and_fail(*args):
    time.sleep(3e-3)
    raise ValueError("as asked")


def living():
    gc.collect()
    return len(_living)


@pytest.mark.parametrize("way", ["sync", "async", "remote", "method", "failing", "returned"])
def test_a_pool_keeps_no_argument_alive(group, workers, to, way, monkeypatch):
    # A record of a failure holds its frames, and pytest the records.
    monkeypatch.setattr(logging.getLogger("mpidist.rpc"), "disabled", True)
    group.barrier()
    if way == "sync":
        threads = [threading.Thread(target=call, args=(to, rest, Tracked())) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert joined(threads, CALL_S) == []
        del threads, thread
    elif way == "method":
        owner = rpc.remote(to, Tracked)
        for future in [owner.rpc_async().rest(Tracked()) for _ in range(8)]:
            assert future.wait()
        del future, owner
    elif way == "remote":
        for rref in [rpc.remote(to, rest, args=(Tracked(),)) for _ in range(8)]:
            assert rref.to_here(timeout=CALL_S) == 1
        del rref
    elif way == "failing":
        for future in [
            rpc.rpc_async(to, rest_and_fail, args=(Tracked(),), timeout=CALL_S) for _ in range(8)
        ]:
            with pytest.raises(ValueError, match="as asked"):
                future.wait()
        del future
    elif way == "returned":
        found = [rpc.rpc_async(to, echo, args=(Tracked(),), timeout=CALL_S) for _ in range(8)]
        assert {type(future.wait()) for future in found} == {Tracked}
        del found
    else:
        found = [
            rpc.rpc_async(to, rest, args=(Tracked(), Tracked()), timeout=CALL_S) for _ in range(8)
        ]
        assert [future.wait() for future in found] == [2] * 8
        del found
    agree(
        group,
        soon(lambda: call(to, living) == 0, 5),
        f"{call(to, living)} arguments live on at {to}",
    )


def test_a_pool_keeps_no_remote_value_alive(group, workers, to):
    """References in the arguments of slow functions end with the calls, and so do their values."""
    values = [Tracked() for _ in range(6)]
    there = weakref.WeakSet(values)
    futures = [rpc.rpc_async(to, rest, args=(rpc.RRef(value),), timeout=CALL_S) for value in values]
    assert [future.wait() for future in futures] == [1] * 6
    del values, futures
    agree(group, soon(lambda: gc.collect() >= 0 and not there, 5), f"{len(there)} values live on")


def test_a_caller_keeps_no_argument_alive(group, workers, to):
    sent = [Tracked() for _ in range(6)]
    there = weakref.WeakSet(sent)
    futures = [rpc.rpc_async(to, rest, args=(one,), timeout=CALL_S) for one in sent]
    for future in futures:
        future.wait()
    del sent, futures, future
    agree(
        group, soon(lambda: gc.collect() >= 0 and not there, 5), f"{len(there)} arguments live on"
    )


# Forks.


class Adder:
    def add(self, x, y):
        return x + y


def in_child(uses):
    """Run functions in a forked child; return their errors: (type name, text, is ours)."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        # Whatever happens, this process ends here: by the alarm if a call waits.
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CALL_S)
            for name, use in uses.items():
                os.write(writer, (json.dumps([name, *raised_by(use)]) + "\n").encode())
        finally:
            os._exit(0)
    os.close(writer)
    data = b""
    deadline = time.monotonic() + CALL_S + 5
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reader, 65536)
        if not piece:
            break
        data += piece
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {name: rest for name, *rest in map(json.loads, data.decode().splitlines())}


def raised_by(use):
    try:
        return "nothing", repr(use()), False
    except BaseException as error:
        return type(error).__name__, str(error), isinstance(error, MpidistError)


def test_a_forked_child_is_refused_and_its_parent_works_on(group, workers, to):
    adder, own = rpc.remote(to, Adder), rpc.RRef(3)
    assert adder.rpc_sync().add(1, 2) == 3
    under_way = rpc.rpc_async(to, rest, args=(1, 2, 3), timeout=CALL_S)
    errors = in_child(
        {
            "rpc_sync": lambda: rpc.rpc_sync(to, echo, args=(1,), timeout=1),
            "rpc_sync to itself": lambda: rpc.rpc_sync(
                workers[group.rank], echo, args=(1,), timeout=1
            ),
            "rpc_async": lambda: rpc.rpc_async(to, echo, args=(1,), timeout=1).wait(),
            "remote": lambda: rpc.remote(to, echo, args=(1,), timeout=1).to_here(timeout=1),
            "rref.rpc_sync": lambda: adder.rpc_sync(timeout=1).add(1, 2),
            "rref.rpc_async": lambda: adder.rpc_async(timeout=1).add(1, 2).wait(),
            "rref as argument": lambda: rpc.rpc_sync(to, echo, args=(own,), timeout=1),
            **({} if adder.is_owner() else {"to_here": lambda: adder.to_here(timeout=1)}),
            "shutdown": lambda: rpc.shutdown(graceful=False),
        }
    )
    wrong = {name: rest for name, rest in errors.items() if not (rest[2] and "fork" in rest[1])}
    agree(
        group,
        not wrong and len(errors) == 9 - adder.is_owner(),
        f"{wrong}; raised: {sorted(errors)}",
    )
    assert under_way.wait() == 3
    assert [call(to, echo, number) for number in range(50)] == list(range(50))
    assert adder.rpc_sync(timeout=CALL_S).add(2, 3) == 5 and own.to_here() == 3


class CallsOthers(Dataset):
    """A data set that reads its items from another worker."""

    def __init__(self, to):
        self.to = to

    def __len__(self):
        return 2

    def __getitem__(self, place):
        return raised_by(lambda: rpc.rpc_sync(self.to, echo, args=(place,), timeout=1))


def test_a_forked_data_loader_is_refused(group, workers, to):
    loader = DataLoader(
        CallsOthers(to),
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=list,
        timeout=CALL_S,
    )
    found = [item for (item,) in loader]
    agree(
        group,
        [ours for _, _, ours in found] == [True] * 2
        and all("fork" in text for _, text, _ in found),
        str(found),
    )
    assert still_answers(to)


# Crowds of callers.


def by_way_of(home, number):
    """Call back to the caller's worker from within its call."""
    return rpc.rpc_sync(home, rested if number % 2 else echo, args=(number,), timeout=0)


def rested(x):
    time.sleep(1e-3)
    return x


@pytest.mark.parametrize("neighbour", ["idle", "busy"])
@pytest.mark.mpi(min_size=2)
def test_more_callers_than_the_pool_has_threads(group, neighbour):
    options = rpc.RpcBackendOptions(num_worker_threads=4)
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    home, to = f"worker{group.rank}", f"worker{(group.rank + 1) % group.size}"
    wrong, end = [], threading.Event()

    def compute():
        x = 0
        while not end.is_set():
            x += 1

    def run(place):
        for number in range(25):
            function, args = [(echo, (number,)), (by_way_of, (home, number)), (rested, (number,))][
                (place + number) % 3
            ]
            found = rpc.rpc_sync(to, function, args=args, timeout=0)
            if found != number:
                wrong.append((place, number, found))

    if neighbour == "busy":
        threading.Thread(target=compute, daemon=True).start()
    threads = [
        threading.Thread(target=run, args=(place,), name=f"caller{place}", daemon=True)
        for place in range(16)
    ]
    group.barrier()
    for thread in threads:
        thread.start()
    late = joined(threads, _TEST_S - 10)
    end.set()
    agree(group, not wrong and not late, f"wrong: {wrong}; not ended: {late}")
    shut_down(group)


def waits_for_type(to):
    return rpc.remote(rpc.get_worker_info(), Adder).remote().add(1, 2).to_here()


def waits_for_callback(to):
    return rpc.rpc_async(to, echo, args=(2,)).then(lambda future: future.wait() + 1).wait()


def waits_for_all(to):
    futures = [rpc.rpc_async(to, echo, args=(1,)) for _ in range(3)]
    return sum(future.wait() for future in torch.futures.collect_all(futures).wait())


def waits_for_block(to):
    with rpc.wait_all():
        futures = [rpc.rpc_async(to, echo, args=(1,)) for _ in range(3)]
    return sum(future.wait() for future in futures)


def waits_for_own_reference(to):
    return rpc.remote(rpc.get_worker_info(), rested, args=(3,)).local_value()


def waits_for_creation(to):
    rref = rpc.remote(rpc.get_worker_info(), rested, args=(3,))
    return rref.rpc_sync().__add__(0)


_WAITS = [waits_for_type, waits_for_block, waits_for_own_reference, waits_for_creation]


@pytest.mark.parametrize("wait", _WAITS, ids=operator.attrgetter("__name__"))
def test_a_pool_of_one_thread_serves_handlers_that_wait(group, wait):
    """A handler that waits for work of its own pool does not count as running, however it waits."""
    options = rpc.RpcBackendOptions(num_worker_threads=1)
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    home, to = f"worker{group.rank}", f"worker{(group.rank + 1) % group.size}"
    for _ in range(3):
        futures = [rpc.rpc_async(to, wait, args=(home,), timeout=5) for _ in range(4)]
        assert [future.wait() for future in futures] == [3] * 4
    shut_down(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "wait", [waits_for_callback, waits_for_all], ids=operator.attrgetter("__name__")
)
def test_callbacks_need_no_place_among_the_handlers(group, wait):
    """A handler that waits for a foreign future counts as running; callbacks run nevertheless."""
    options = rpc.RpcBackendOptions(num_worker_threads=1)
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    home, to = f"worker{group.rank}", f"worker{(group.rank + 1) % group.size}"
    for rank in range(group.size):
        # One after the other: the caller has a place for what the handler calls.
        if rank == group.rank:
            futures = [rpc.rpc_async(to, wait, args=(home,), timeout=5) for _ in range(4)]
            assert [future.wait() for future in futures] == [3] * 4
        group.barrier()
    shut_down(group)


# The rest.

_gate = threading.Event()


def opens_gate():
    _gate.set()


_waiting: list[int] = []


def waits_for_gate():
    _waiting.append(1)
    return _gate.wait(CALL_S)


def test_a_value_may_come_after_all_who_waited_have_given_up(group, workers):
    """No thread waits after the limits of the fetch and of the creation have expired."""
    _gate.clear()
    rref = rpc.remote(workers[group.rank], waits_for_gate, timeout=0.2)
    with pytest.raises((CommTimeout, RRefError)):
        rref.to_here(timeout=0.05)
    with pytest.raises(RRefError, match="timed out"):
        rref.to_here(timeout=CALL_S)
    _gate.set()
    assert still_answers(workers[group.rank])


def test_wait_all_raises_before_slower_calls_have_ended(group, workers, to):
    _gate.clear()
    group.barrier()
    slow = []

    def wait_for_both():
        with rpc.wait_all():
            slow.append(rpc.rpc_async(to, waits_for_gate, timeout=CALL_S))
            rpc.rpc_async(to, fail, args=(ValueError, "at once"), timeout=CALL_S)

    with pytest.raises(ValueError, match="at once"):
        wait_for_both()
    was_done = slow[0].done()
    call(to, opens_gate)
    assert slow[0].wait() is True and not was_done


@pytest.mark.long
def test_begins_and_ends_three_hundred_times(group):
    for turn in range(300):
        rpc.init_rpc(f"w{group.rank}", group=group)
        assert call((group.rank + 1) % group.size, echo, turn) == turn
        rpc.shutdown(timeout=CALL_S)


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_leaves_fails_all_calls_that_wait_for_it(group, workers):
    """Calls of handlers, threads and futures fail when their worker leaves; none waits forever."""
    _gate.clear()
    _waiting.clear()
    group.barrier()
    if group.rank == 1:
        # The functions return after their callers have got an error.
        opener = threading.Thread(target=lambda: group.recv_object(0) and _gate.set())
        opener.start()
        assert soon(lambda: len(_waiting) == 7)
        rpc.shutdown(graceful=False)
        opener.join()
    elif group.rank == 0:
        found = []

        def wait():
            try:
                rpc.rpc_sync("worker1", waits_for_gate, timeout=0)
            except RankFailureError as error:
                found.append("worker1" in str(error))

        threads = [threading.Thread(target=wait, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        future = rpc.rpc_async("worker1", waits_for_gate, timeout=0)
        with pytest.raises(RankFailureError, match="worker1"):
            future.wait()
        late = joined(threads, CALL_S)
        group.send_object(True, 1)
        assert late == [] and found == [True] * 6
    group.barrier()
    if api._is_current_rpc_agent_set():
        with pytest.raises(RankFailureError, match="worker1"):
            rpc.shutdown(timeout=CALL_S)
    group.barrier()


# Faults on the way of one message, which must not count twice, or end a worker.


class Odd:
    """A callable whose name is not a string."""

    def __init__(self):
        self.__qualname__ = []

    def __call__(self):
        return 5


def test_a_callable_whose_name_is_no_text_can_be_called(workers, to):
    assert [call(to, Odd()) for _ in range(2)] == [5, 5]
    assert still_answers(to)


def exits(*_):
    raise SystemExit("made of what came")


class Exiting:
    def __reduce__(self):
        return exits, ()


def test_an_answer_whose_reading_exits_fails_its_call_alone(workers, to):
    future = rpc.rpc_async(to, Exiting, timeout=CALL_S)
    with pytest.raises(RuntimeError, match="SystemExit"):
        future.wait()
    assert still_answers(to)


def test_references_in_a_call_of_an_unknown_function_are_released(group, workers, to):
    made = lambda *_: None  # noqa: E731
    made.__qualname__ = f"only_on_{group.rank}"
    made.__module__ = __name__
    setattr(sys.modules[__name__], made.__qualname__, made)
    held = rpc.RRef(3)
    if group.size > 1:
        with pytest.raises(MpidistError, match="does not serialize"):
            call(to, made, held)
    store = api._get_current_rpc_agent().references.store
    assert soon(lambda: not store.leaks())


def test_a_request_refused_for_its_references_is_counted_once(group, workers, to):
    agent = api._get_current_rpc_agent()
    agent.dispatcher._transport.send(
        agent.workers.rank_of(to), int(message.Kind.CALL_PYTHON), flags=message.REFERENCES
    )
    assert soon(lambda: agent.dispatcher.requests_received == agent.wire.answered == 1)
    group.barrier()


def test_a_bytearray_may_grow_once_its_call_has_returned(workers, to):
    grows = bytearray(1 << 20)
    for _ in range(20):
        assert call(to, len, grows) == len(grows)
        grows += b"more"


def test_blocks_that_wait_for_all_may_be_nested(workers, to):
    with rpc.wait_all():
        outer = rpc.rpc_async(to, time.sleep, args=(0.1,), timeout=CALL_S)
        with rpc.wait_all():
            inner = rpc.rpc_async(to, echo, timeout=CALL_S)
        assert inner.done()
    assert outer.done()


def test_a_creation_completes_its_future_once_in_either_order(workers, to):
    made = []

    def error_of(call):
        made[0].run()  # as another thread could at this moment
        return ValueError("raised once")

    for begin in (Creation.future, Creation.complete):
        creation = Creation(0, "what", 0.0, error_of, None, lambda call: None)
        made[:] = [creation]
        incoming = types.SimpleNamespace(kind=int(message.Kind.EXCEPTION))
        if begin is Creation.complete:
            creation.future()
            creation.complete(incoming).run()
        else:
            creation.complete(incoming)
        with pytest.raises(ValueError, match="raised once"):
            creation.future().wait()


# What users may do to the threads that serve all calls.


@pytest.mark.parametrize("way", ["result", "exception", "creation", "type"])
def test_a_future_that_its_user_has_completed_keeps_what_he_has_set(workers, to, way):
    """A user's own time limit, in place of the answer that comes later."""
    mine = "mine"
    if way == "creation":
        future = rpc.remote(to, time.sleep, args=(0.3,), timeout=CALL_S)._get_future()
        future.set_result(mine)
    elif way == "type":
        reference = rpc.remote(workers[rpc.get_worker_info().id], time.sleep, args=(0.3,))
        future = reference._get_type(blocking=False)
        future.set_result(mine)
    else:
        future = rpc.rpc_async(to, time.sleep, args=(0.3,), timeout=CALL_S)
        if way == "result":
            future.set_result(mine)
        else:
            future.set_exception(ValueError(mine))
    time.sleep(0.6)
    if way == "exception":
        with pytest.raises(ValueError, match=mine):
            future.wait()
    else:
        assert future.wait() == mine
    assert still_answers(to) and rpc.rpc_async(to, echo, args=(1,)).wait() == 1


def test_a_thread_that_waits_gets_what_the_user_sets_before_the_answer(workers, to):
    gate = threading.Event()
    future = rpc.rpc_async(to, time.sleep, args=(2.0,), timeout=CALL_S)
    timer = threading.Timer(0.1, future.set_result, ("mine",))
    timer.start()
    answered = rpc.rpc_async(to, echo, args=(1,), timeout=CALL_S)
    answered.add_done_callback(lambda _: gate.set())
    call_of_it = future.call
    assert future.wait() == "mine" and gate.wait(CALL_S)
    # The answer was not waited for.
    assert call_of_it.incoming is None and call_of_it.future is future
    timer.join()


class Raising(logging.Handler):
    """A user's handler that raises, as one to a disk that is full."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def emit(self, record):
        raise self.error


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
@pytest.mark.parametrize("is_filter", [False, True], ids=["handler", "filter"])
def test_a_log_that_raises_ends_nothing(group, workers, to, capfd, kind, is_filter):
    log, one = logging.getLogger("mpidist.rpc"), Raising(kind("the log is full"))
    add, remove = (
        (log.addFilter, log.removeFilter) if is_filter else (log.addHandler, log.removeHandler)
    )
    what = one.emit if is_filter else one
    add(what)
    try:
        for invoke in (rpc.rpc_sync, lambda *args, **kw: rpc.remote(*args, **kw).to_here()):
            with pytest.raises(ValueError, match="as asked"):
                invoke(to, rest_and_fail, timeout=CALL_S)
        assert still_answers(to)
        group.barrier()
    finally:
        remove(what)
    agree(group, "the log is full" in capfd.readouterr().err)
