"""Whose thread runs whose code: waits under a lock of the user, and waits that are interrupted."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import time

import pytest
import torch

import mpidist.autograd as dist_autograd
import mpidist.rpc as rpc
from mpidist.rpc import current
from tests.rpc.limits import soon
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)

_LOCK = threading.Lock()  # of the user, held while a call waits
_KEPT = []
_LONG_S = 30  # a deadline that is not reached


def echo(value):
    return value


def slow(value):
    time.sleep(0.005)
    return value


class Guarded:
    """A value whose state is guarded by the user's lock wherever it is pickled or unpickled."""

    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        with _LOCK if current.require().workers.me.id == 0 else contextlib.nullcontext():
            return {"value": self.value}

    def __setstate__(self, state):
        with _LOCK if current.require().workers.me.id == 0 else contextlib.nullcontext():
            self.__dict__.update(state)


def make_guarded(value):
    return Guarded(value)


def fetch_often(rref, count):
    return sum(rref.to_here(timeout=_LONG_S).value for _ in range(count))


def other():
    return current.require().workers.infos[1].name


def call_under_lock():
    with _LOCK:
        return rpc.rpc_sync(other(), slow, (7,), timeout=_LONG_S) == 7


@pytest.mark.parametrize("joined", [False, True])
def test_callbacks_do_not_run_in_a_thread_that_waits(group, workers, joined):
    """Neither those of the future itself, nor those behind a future of C++."""
    found = True
    if group.rank == 0:
        ran, is_waiting = [], False

        def note(future):
            # Of futures that are complete ``then`` runs the callback, in the thread that calls it.
            if is_waiting and threading.current_thread() is threading.main_thread():
                ran.append(False)
                return
            with _LOCK:
                ran.append(True)

        for _ in range(20):
            futures = [rpc.rpc_async(other(), echo, (number,)) for number in range(2)]
            (torch.futures.collect_all(futures) if joined else futures[0]).then(note)
            is_waiting = True
            found = call_under_lock() and found
            with _LOCK:
                found = [future.wait() for future in futures] == [0, 1] and found
            is_waiting = False
        found = soon(lambda: len(ran) == 20) and all(ran) and found
    agree(group, found)


def test_answers_of_other_calls_are_not_read_by_a_thread_that_waits(group, workers):
    found = True
    if group.rank == 0:
        for number in range(20):
            future = rpc.rpc_async(other(), make_guarded, (number,), timeout=_LONG_S)
            found = call_under_lock() and future.wait().value == number and found
    agree(group, found)


def test_fetches_are_not_answered_by_a_thread_that_waits(group, workers):
    found = True
    if group.rank == 0:
        rref = rpc.RRef(Guarded(3))
        future = rpc.rpc_async(other(), fetch_often, (rref, 50), timeout=_LONG_S)
        while not future.done():
            found = call_under_lock() and found
        found = future.wait() == 150 and found
    agree(group, found)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.01)
        return gradient


def slow_backward(tensor):
    return Slow.apply(tensor)


def use_kept(tensor):
    return _KEPT[0] * tensor


def test_another_workers_pass_does_not_run_in_a_thread_that_waits(group, workers):
    """Its hook takes the lock that this worker's thread holds within its own backward pass."""
    hooked = []
    if group.rank == 0:
        parameter = torch.ones(2, requires_grad=True)

        def hook(gradient):
            with _LOCK:
                hooked.append(threading.current_thread())

        parameter.register_hook(hook)
        _KEPT[:] = [parameter]
    agree(group, True)
    if group.rank < 2:
        to = current.require().workers.infos[1 - group.rank].name
        for _ in range(20):
            with dist_autograd.context() as context:
                tensor = torch.ones(2, requires_grad=True)
                function = slow_backward if group.rank == 0 else use_kept
                root = rpc.rpc_sync(to, function, (tensor,), timeout=_LONG_S).sum()
                with _LOCK:
                    dist_autograd.backward(context, [root])
    is_right = bool(hooked) and threading.main_thread() not in hooked
    agree(group, group.rank != 0 or is_right, str(hooked))
    _KEPT.clear()


class Limit(Exception):
    """What the handler of a signal raises: a time limit of the user's."""


@contextlib.contextmanager
def alarms(handler):
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def waits(rref, to, number):
    """The ways to wait, with small values and with values that travel as payloads."""
    large = torch.full((20_000,), float(number))
    yield lambda: rpc.rpc_sync(to, echo, (number,), timeout=_LONG_S) == number
    yield lambda: rpc.rpc_async(to, echo, (number,), timeout=_LONG_S).wait() == number
    yield lambda: rref.to_here(timeout=_LONG_S) == "kept"
    yield lambda: torch.equal(rpc.rpc_sync(to, echo, (large,), timeout=_LONG_S), large)


def call_back(to, stop):
    """Call the worker whose main thread is interrupted, until it says so; return the errors."""
    errors, number = [], 0
    while not stop:
        number += 1
        try:
            if (
                rpc.rpc_sync(to, echo, (bytes(3000) + b"%d" % number,), timeout=_LONG_S)[3000:]
                != b"%d" % number
            ):
                errors.append(f"a wrong value in call {number}")
        except Exception as error:
            errors.append(repr(error))
    return errors


def stop_calls():
    _KEPT.append(True)


def test_waits_that_a_signals_handler_ends_lose_nothing(group, workers):
    """The handler raises at any step; all later calls, and the other worker's, are as before."""
    errors, rng, counts = [], random.Random(5), [0, 0]
    del _KEPT[:]
    if group.rank == 1:
        errors = call_back(current.require().workers.infos[0].name, _KEPT)
    if group.rank == 0:
        is_armed = False

        def raise_limit(number, frame):
            nonlocal is_armed
            if is_armed:
                is_armed = False
                raise Limit

        to = other()
        rref = rpc.remote(to, echo, ("kept",))
        with alarms(raise_limit):
            for number in range(150):
                try:
                    is_armed = True
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-4, 3e-3))
                    while is_armed:
                        for wait in waits(rref, to, number):
                            counts[0] += 1
                            if not wait():
                                errors.append("a wrong value")
                except Limit:
                    counts[1] += 1
        for number in range(5):
            errors += ["a wrong value after"] * sum(not wait() for wait in waits(rref, to, number))
        rpc.rpc_sync(to, stop_calls)
        del rref
        if not soon(lambda: len(current.require().calls) == 0):
            errors.append("calls are left")
        if counts[1] < 100:
            errors.append(f"{counts} calls and interruptions")
    agree(group, not errors, str(errors[:3]))


def test_a_signals_handler_may_call_while_the_main_thread_waits(group, workers):
    answers = []
    if group.rank == 0:
        to = other()

        def call(number, frame):
            answers.append(rpc.rpc_sync(to, echo, (len(answers),), timeout=_LONG_S))

        with alarms(call):
            for number in range(50):
                signal.setitimer(signal.ITIMER_REAL, 1e-3)
                while len(answers) == number:
                    assert rpc.rpc_sync(to, echo, (5,), timeout=_LONG_S) == 5
    agree(group, answers == list(range(len(answers))), str(answers))


def test_finalizers_may_call_while_the_main_thread_waits(group, workers):
    answers, errors = [], []
    if group.rank == 0:
        to = other()

        class Handle:
            def __init__(self):
                self.cycle = self

            def __del__(self):
                try:
                    answers.append(rpc.rpc_sync(to, echo, (1,), timeout=_LONG_S))
                except Exception as error:
                    errors.append(repr(error))

        while len(answers) < 500 and not errors:
            Handle()
            rpc.rpc_sync(to, echo, (bytes(100),), timeout=_LONG_S)
        gc.collect()
    agree(group, not errors and set(answers) <= {1}, str(errors[:3]))
