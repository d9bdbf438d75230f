"""Contexts: ids, creation by messages, and release on all workers with late messages and deaths."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.autograd.api import _engine
from mpidist.autograd.context import Contexts
from mpidist.rpc import api
from tests.rpc.limits import soon
from tests.rpc.network import delayed
from tests.tools.support import agree, printed, short_job

mpi = pytest.mark.mpi(min_size=1)
clean = pytest.mark.usefixtures("clean")


def test_numbers_are_of_their_worker_and_used_once():
    contexts = Contexts()
    made = [contexts.create(3).number for _ in range(100)] + [
        contexts.make_id(3) for _ in range(100)
    ]
    assert (
        len(set(made)) == 200 and {number >> 48 for number in made} == {3} and len(contexts) == 100
    )


def test_a_request_makes_a_context_of_another_worker_and_none_of_ours():
    contexts = Contexts()
    contexts.request_arrived(1, 2 << 48 | 5, 0)
    contexts.request_arrived(1, 2 << 48 | 5, 2)
    contexts.request_arrived(1, 1 << 48 | 5, 0)  # ours has ended
    assert [one.callers for one in contexts.values()] == [{0, 2}] and contexts.find(
        1 << 48 | 5
    ) is None
    contexts.request_arrived(1, 2 << 48 | 5, 1)
    contexts.release(2 << 48 | 5, 1)
    # A request that the worker sent to itself before the clean-up; no further clean-up follows.
    contexts.request_arrived(1, 2 << 48 | 5, 1)
    assert not len(contexts)


def current_id():
    return autograd._current_context()._context_id()


def current_by_way_of(*path):
    return [
        current_id(),
        *(rpc.rpc_sync(path[0], current_by_way_of, args=path[1:]) if path else []),
    ]


def fails():
    raise ValueError("as asked")


@mpi
@clean
def test_the_context_travels_through_nested_calls(group, workers, to):
    me = workers[group.rank]
    with autograd.context() as context:
        assert context >> 48 == group.rank and current_id() == context
        path = [to, workers[(group.rank + 2) % group.size], me, to]
        assert rpc.rpc_sync(to, current_by_way_of, args=path) == [context] * 5
        assert rpc.remote(to, current_id).to_here() == context
        assert rpc.rpc_async(to, current_id).wait() == context
        with pytest.raises(ValueError, match="as asked"):
            rpc.rpc_sync(to, fails)
        with (
            pytest.raises(
                RuntimeError, match="Already have an autograd context id for this thread"
            ),
            autograd.context(),
        ):
            pass
        assert (group.rank + 1) % group.size in autograd._current_context()._known_worker_ids()
    assert not autograd._is_valid_context(context)
    with pytest.raises(RuntimeError, match="have a valid autograd context"):
        autograd._current_context()
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context}"):
        autograd.get_gradients(context)
    assert rpc.rpc_sync(to, interceptor_context) == 0
    group.barrier()


def interceptor_context():
    return _engine.current_context()


@mpi
@clean
def test_torchs_names(group, workers, to):
    made = autograd._new_context()
    number = made._context_id()
    assert autograd._retrieve_context(number) is made is autograd._current_context()
    assert autograd._is_valid_context(number)
    assert autograd._get_max_id() == (group.rank << 48) + 2**48 - 1 >= number
    x = torch.ones(2, requires_grad=True)
    came = rpc.rpc_sync(to, torch.mul, args=(x, 2))
    sends, receives = made._send_functions(), made._recv_functions()
    if group.size > 1:  # a worker that calls itself has both ends in one context
        assert len(sends) == len(receives) == 1
    assert next(iter(sends.values())).next_functions[0][0].variable is x
    assert came.grad_fn in receives.values()
    assert came.grad_fn.name() == "torch::distributed::autograd::RecvRpcBackward"
    assert set(autograd._get_debug_info()) == {
        "num_current_backward_passes",
        "num_autograd_contexts",
    }
    assert set(autograd._get_debug_info()) <= set(rpc._get_debug_info())
    autograd._release_context(number)
    assert not autograd._is_valid_context(number)
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        autograd._release_context(number)
    group.barrier()


def doubled(x):
    return x * 2


def doubled_later(path, seconds, x):
    """Call other workers after a delay, when the context has ended."""
    time.sleep(seconds)
    return rpc.rpc_sync(path[0], doubled_later, args=(path[1:], seconds, x)) if path else x * 2


def run_and_leave(group, workers, rounds, seconds):
    futures = []
    for number in range(rounds):
        # large ones are overtaken by their clean-up
        x = torch.ones(40_000 if number % 3 == 0 else 2, requires_grad=True)
        path = [workers[(group.rank + 1 + number * step) % group.size] for step in range(3)]
        with autograd.context():
            futures.append(rpc.rpc_async(path[0], doubled_later, args=(path[1:], seconds, x)))
            rpc.remote(path[1], doubled, args=(x,))
    for future in futures:
        assert future.wait()[0].item() == 2


@mpi
@clean
def test_contexts_end_before_their_calls_do(group, workers):
    run_and_leave(group, workers, 6, 0.01)
    group.barrier()


@mpi
@clean
def test_contexts_end_exactly_however_late_messages_are(group, workers):
    with delayed(group.rank):
        run_and_leave(group, workers, 6, 0.003)
        group.barrier()


def leave_nothing(group, to, count):
    x = torch.ones(2, requires_grad=True)
    alive = []
    for number in range(count):
        with autograd.context() as context:
            loss = rpc.rpc_sync(to, doubled, args=(x,)).sum()
            if number % 2:
                autograd.backward(context, [loss], mode="smart" if number % 4 == 1 else "fast")
            elif number % 8 == 0:
                alive.append(weakref.ref(autograd._current_context()))
    del loss
    group.barrier()
    gc.collect()
    ended = soon(lambda: not len(_engine.contexts), 20)
    agree(group, ended and not any(ref() for ref in alive), f"{len(_engine.contexts)}")


@mpi
@clean
def test_many_contexts_leave_nothing(group, workers, to):
    leave_nothing(group, to, 300)


@mpi
@clean
@pytest.mark.long
def test_ten_thousand_contexts_leave_nothing(group, workers, to):
    leave_nothing(group, to, 10_000 // group.size)


@mpi
@clean
def test_threads_have_contexts_of_their_own(group, workers, to):
    found, wrong = {}, []

    def run(place):
        try:
            x = torch.full((2,), float(place), requires_grad=True)
            for _ in range(10):
                with autograd.context() as context:
                    loss = (rpc.rpc_sync(to, doubled, args=(x,)) ** 2).sum()
                    autograd.backward(context, [loss])
                    found[place] = autograd.get_gradients(context)[x].tolist()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    agree(
        group,
        not wrong and found == {place: [8.0 * place] * 2 for place in range(6)},
        f"{wrong} {found}",
    )


@mpi
@clean
def test_an_answer_to_a_context_that_has_ended_is_an_ordinary_result(group, workers, to, logged):
    x = torch.ones(3, requires_grad=True)
    with autograd.context():
        future = rpc.rpc_async(to, doubled_later, args=([], 0.02, x))
    came = future.wait()
    assert came.tolist() == [2, 2, 2] and len(_engine.contexts) <= group.size
    group.barrier()
    agree(group, not logged, f"{logged}")


ORPHANS = """
    import json, os, sys, time
    import torch
    import mpidist.comm, mpidist.rpc as rpc, mpidist.autograd as autograd
    from mpidist.autograd.api import _engine

    world = mpidist.comm.init()
    rpc.init_rpc(f"worker{world.rank}")

    def pass_on(to):
        return rpc.rpc_sync(to, autograd_id) if to else None

    def autograd_id():
        return autograd._current_context()._context_id()

    def wait_until(done):
        deadline = time.monotonic() + 30
        while not done() and time.monotonic() < deadline:
            time.sleep(0.005)
        return done()

    gone = []

    def leave():
        gone.append(1)

    agent = rpc._get_current_rpc_agent()
    if world.rank == 0:
        with autograd.context() as context:
            assert rpc.rpc_sync("worker1", pass_on, args=("worker2",)) == context  # 0 → 1 → 2
            rpc.rpc_async("worker1", leave)
            assert wait_until(lambda: 1 in agent.workers.left)
            # Worker 1, from which worker 2 has the context, is gone: worker 2 asks this one.
            assert wait_until(lambda: 2 in autograd._current_context()._known_worker_ids())
        assert not len(_engine.contexts)
    if world.rank == 1:
        assert wait_until(lambda: gone)
    if world.rank == 2:
        assert wait_until(lambda: 1 in agent.workers.left)
        assert wait_until(lambda: not len(_engine.contexts)), "the context is left over"
    print(json.dumps({"rank": world.rank}), flush=True)
    rpc.shutdown(graceful=False)
    world.barrier()
"""


@pytest.mark.slow
def test_contexts_known_from_a_worker_that_left_end_all_the_same():
    assert set(printed(short_job(3, ORPHANS))) == {0, 1, 2}


@mpi
def test_a_shutdown_within_a_context_ends_the_context(group):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    with autograd.context() as context:
        rpc.rpc_sync(
            f"worker{(group.rank + 1) % group.size}",
            doubled,
            args=(torch.ones(1, requires_grad=True),),
        )
        rpc.shutdown()
        agree(
            group,
            not len(_engine.contexts) and not autograd._is_valid_context(context),
            "contexts are left",
        )
    assert not api._is_current_rpc_agent_set()
    with pytest.raises(RuntimeError, match="not been initialized"), autograd.context():
        pass
