"""Hooks for distributed autograd: contexts in all messages, replaced tensors, own kinds."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from unittest import mock

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import MpidistError, RankFailureError
from mpidist.rpc import api
from mpidist.rpc.calls.wire import Wire
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.message import FIRST_RESPONSE, GRADIENTS, Kind
from mpidist.rpc.threads import interceptor
from tests.rpc.limits import soon
from tests.rpc.network import delayed
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


class Recording:
    """An engine that records all calls, and doubles the tensors of messages with a number."""

    def __init__(self):
        self.here = threading.local()
        self.lock = threading.Lock()
        self.left, self.arrived, self.entered, self.one_way, self.gone, self.came = (
            [],
            [],
            [],
            [],
            [],
            [],
        )
        self.handled = 0
        self.number = 2**63 + 5
        self.on_one_way = lambda obj: None

    def current_context(self):
        return getattr(self.here, "context", 0)

    @contextlib.contextmanager
    def within(self, context):
        before, self.here.context = self.current_context(), context
        try:
            yield
        finally:
            self.here.context = before

    def leaving(self, context, to, tensors, is_answer):
        with self.lock:
            self.left.append((context, to, list(tensors), is_answer))
        return self.number if tensors else 0

    def arriving(self, context, source, number, tensors, is_answer):
        assert number == self.number
        with self.lock:
            self.arrived.append((context, source, list(tensors), is_answer))
        return [tensor.detach() * 2 for tensor in tensors]

    @contextlib.contextmanager
    def entering(self, context, source, is_answer):
        with self.lock:
            self.entered.append((context, source, is_answer))
        with self.within(context):
            yield

    def handle(self, source, kind, context, obj):
        if obj is None:
            raise ValueError("no context")
        return source, kind, context, obj

    def handle_one_way(self, source, kind, context, obj):
        if kind != Kind.AUTOGRAD_NOTICE:
            assert obj[:4] == (3, 2**64 - 1, 5, 1)
            obj = obj[4]
        with self.lock:
            self.one_way.append((source, kind, context, obj, threading.current_thread().name))
        self.on_one_way(obj)
        if obj == "fails":
            raise ValueError("an error of the engine")

    def worker_left(self, rank):
        self.gone.append(rank)

    def request_arrived(self, context, source):
        with self.lock:
            self.came.append((context, source))

    def stopped(self):
        self.is_stopped = True

    def backward(self, context, root, retain_graph, mode):
        self.passes = (context, root, retain_graph, mode)

    def debug_info(self):
        return {"num_current_dist_autograd_contexts": "0"}


@pytest.fixture
def engine(group):
    """Registered before RPC begins, and for longer than it lasts."""
    interceptor.register(made := Recording())
    yield made
    group.barrier()
    interceptor.register(None)


@pytest.fixture
def posted(monkeypatch):
    """Return what all messages of this process but the shortest are: (to, kind, context)."""
    seen, post = [], Wire.post

    def noting(self, to, kind, sequence=0, context=0, *more, **options):
        seen.append((to, int(kind), context))
        post(self, to, kind, sequence, context, *more, **options)

    monkeypatch.setattr(Wire, "post", noting)
    return seen


def add_one(x):
    return x + 1


def nothing():
    return None


def fail(*args):
    raise ValueError("as requested")


def my_context():
    return interceptor.engine.current_context()


def context_of(rank):
    return 2**40 + rank


def test_every_kind_of_message_carries_the_context(group, engine, posted, workers, to):
    mine, next_rank = context_of(group.rank), (group.rank + 1) % group.size
    # Without the messages of init_rpc. A request of the worker before this one may arrive at once.
    posted.clear()
    group.barrier()
    with engine.within(mine):
        assert rpc.rpc_sync(to, nothing) is None
        assert rpc.rpc_sync(to, my_context) == mine
        # doubled on both ways
        assert rpc.rpc_sync(to, add_one, args=(torch.ones(2),)).tolist() == [6, 6]
        with pytest.raises(ValueError, match="as requested"):
            rpc.rpc_sync(to, fail)
        reference = rpc.remote(to, add_one, args=(1,))
        lost = rpc.remote(to, fail, args=(torch.ones(1),))
        assert reference.to_here() == 2
        with pytest.raises(ValueError, match="as requested"):
            lost.to_here()
        assert soon(lambda: not api._get_current_rpc_agent().calls.creations())
    group.barrier()
    before = (group.rank - 1) % group.size
    requests = {
        (one[1], one[2]) for one in posted if one[0] == next_rank and one[1] < FIRST_RESPONSE
    }
    kinds = {Kind.CALL_PYTHON, Kind.REMOTE_PYTHON}
    if group.size > 1:
        kinds.add(Kind.RREF_FETCH)  # a value of this worker's needs none
    agree(group, requests == {(kind, mine) for kind in kinds}, f"requests {requests}")
    answers = {
        (one[1], one[2])
        for one in posted
        if one[0] == before and FIRST_RESPONSE <= one[1] < Kind.RREF_FORK
    }
    kinds = {Kind.RESULT, Kind.EXCEPTION, Kind.REMOTE_DONE}
    agree(group, answers == {(kind, context_of(before)) for kind in kinds}, f"answers {answers}")
    # The engine sees them all, those without tensors too, and knows answers from requests.
    for is_answer, context, other in ((False, mine, next_rank), (True, context_of(before), before)):
        seen = [one for one in engine.left if one[3] == is_answer]
        agree(group, {one[:2] for one in seen} == {(context, other)}, f"{is_answer}: {seen}")
        agree(
            group,
            any(one[2] for one in seen) and any(not one[2] for one in seen),
            f"{is_answer}: {seen}",
        )
    arrived = {(one[0], one[1], one[3]) for one in engine.arrived}
    agree(
        group,
        arrived == {(context_of(before), before, False), (mine, next_rank, True)},
        f"{arrived}",
    )
    agree(group, set(engine.came) == {(context_of(before), before)}, f"{engine.came}")
    agree(group, set(engine.entered) == {(context_of(before), before, False)}, f"{engine.entered}")
    del reference, lost


def echo(*args):
    return args


def test_tensors_of_all_kinds_reach_the_engine_themselves_and_are_replaced(
    group, engine, workers, to
):
    sparse = torch.eye(3).to_sparse()
    weight = torch.nn.Parameter(torch.ones(2))
    large = torch.ones(50_000, requires_grad=True)
    with engine.within(7):
        came = rpc.rpc_sync(to, echo, args=(sparse, [weight], {"k": large}, 1, torch.ones(3) * 2))
    assert torch.equal(came[0].to_dense(), torch.eye(3) * 4) and came[0].layout is torch.sparse_coo
    assert (
        came[1][0].tolist() == [4, 4]
        and came[2]["k"].eq(4).all()
        and came[3] == 1
        and came[4].tolist() == [8] * 3
    )
    (mine,) = [one[2] for one in engine.left if not one[3]]
    assert [id(one) for one in mine[:3]] == [id(sparse), id(weight), id(large)] and len(mine) == 4
    group.barrier()  # by now the request of the worker before this one has arrived
    there = next(one[2] for one in engine.arrived if not one[3])
    assert [type(one) for one in there] == [
        torch.Tensor,
        torch.nn.Parameter,
        torch.Tensor,
        torch.Tensor,
    ]
    assert (
        there[0].layout is torch.sparse_coo
        and there[2].requires_grad
        and not there[3].requires_grad
    )
    group.barrier()


def test_outside_a_context_the_engine_sees_nothing(group, engine, workers, to):
    with mock.patch.object(
        Wire, "_post", autospec=True, side_effect=AssertionError("the slow path")
    ):
        assert rpc.rpc_sync(to, add_one, args=(1,)) == 2
        assert rpc.rpc_async(to, add_one, args=(1,)).wait() == 2
        assert rpc.remote(to, add_one, args=(1,)).to_here() == 2
        group.barrier()
    assert rpc.rpc_sync(to, add_one, args=(torch.ones(1),)).item() == 2
    group.barrier()
    agree(
        group,
        not engine.left and not engine.arrived and not engine.entered,
        f"{engine.left} {engine.entered}",
    )


def test_callbacks_run_in_the_context_in_which_they_were_given(group, engine, workers, to):
    future = rpc.rpc_async(to, slow_echo, args=(1,))
    with engine.within(31):
        first = future.then(lambda done: (engine.current_context(), done.value()))
    seen, completed = [], threading.Event()
    with engine.within(32):
        future.add_done_callback(
            lambda done: (seen.append(engine.current_context()), completed.set())
        )
    second = future.then(lambda done: engine.current_context())
    assert first.wait() == (31, 1) and second.wait() == 0
    assert completed.wait(20) and seen == [32]
    assert (31, -1, True) in engine.entered and (32, -1, True) in engine.entered
    group.barrier()


def slow_echo(x):
    time.sleep(0.05)
    return x


def test_requests_of_its_own_kinds(group, engine, workers, to):
    agent = api._get_current_rpc_agent()
    peer = agent.workers.rank_of(to)

    def ask(kind, obj, what):
        return agent.calls.request(peer, kind, b"", obj, UNSET_RPC_TIMEOUT, what)

    with engine.within(9):
        assert ask(Kind.BACKWARD_AUTOGRAD, ["gradient"], "a backward request") == (
            *(group.rank, Kind.BACKWARD_AUTOGRAD, 9, ["gradient"]),
        )
        with pytest.raises(ValueError, match="no context"):
            ask(Kind.BACKWARD_AUTOGRAD, None, "a request that fails")
    assert "num_current_dist_autograd_contexts" in rpc._get_debug_info()
    reference = rpc.RRef(torch.ones(1))
    reference.backward(3, True, mode="smart")
    assert engine.passes == (3, reference.local_value(), True, "smart")
    rpc.remote(to, torch.ones, args=(1,)).to_here()
    group.barrier()
    group.barrier()
    interceptor.register(None)
    group.barrier()
    with pytest.raises(MpidistError, match="no autograd is in use"):
        ask(Kind.BACKWARD_AUTOGRAD, None, "a request that fails")
    group.barrier()


def shut_down_behind_one_way_messages(group, engine, count):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    agent, rng = api._get_current_rpc_agent(), random.Random(group.rank)
    with engine.within(11):
        for number in range(count):
            obj = (number, torch.ones(rng.choice([1, 20_000])))
            for to in range(group.size):
                kind = rng.choice([Kind.GRADIENTS, Kind.REQUEST_GRADIENTS, Kind.AUTOGRAD_NOTICE])
                # Gradients have four numbers before their content.
                prefix = (
                    b"" if kind == Kind.AUTOGRAD_NOTICE else GRADIENTS.pack(3, 2**64 - 1, 5, True)
                )
                agent.engine_messages.send(to, kind, obj, prefix=prefix)
    rpc.shutdown()
    seen = list(engine.one_way)  # before any collective: all were handled by now
    expected = sorted((source, number) for source in range(group.size) for number in range(count))
    agree(
        group,
        sorted((one[0], one[3][0]) for one in seen) == expected,
        f"{len(seen)} of {len(expected)}",
    )
    agree(group, all(one[2] == 11 and one[3][1].eq(2).all() for one in seen), "contents")
    for source in range(group.size):
        small = [one[3][0] for one in seen if one[0] == source and one[3][1].numel() == 1]
        agree(
            group, small == sorted(small), "messages without payloads keep the order of their pair"
        )


def test_one_way_messages_are_handled_before_a_graceful_shutdown_returns(group, engine):
    shut_down_behind_one_way_messages(group, engine, 30)


def test_one_way_messages_are_awaited_however_late_they_are(group, engine):
    with delayed(group.rank):
        shut_down_behind_one_way_messages(group, engine, 10)


def test_one_way_messages_are_not_handled_by_a_thread_that_waits(group, engine, workers):
    """A call to the own worker is answered after earlier messages have been handled."""
    agent, me = api._get_current_rpc_agent(), group.rank
    for _ in range(50):
        agent.engine_messages.send(me, Kind.AUTOGRAD_NOTICE, "mine")
        assert rpc.rpc_sync(me, add_one, args=(1,)) == 2
    threads = {one[4] for one in engine.one_way}
    is_right = threads and all(name.startswith("mpidist-rpc") for name in threads)
    agree(group, is_right, f"{threads}")


def test_a_one_way_message_that_fails_does_not_end_the_polling(group, engine, workers, to, logged):
    agent = api._get_current_rpc_agent()
    peer = agent.workers.rank_of(to)
    agent.engine_messages.send(peer, Kind.AUTOGRAD_NOTICE, "fails")
    agent.engine_messages.send(peer, Kind.AUTOGRAD_NOTICE, "follows")
    group.barrier()
    assert rpc.rpc_sync(to, add_one, args=(1,)) == 2
    failed = f"a one-way message of rank {(group.rank - 1) % group.size} failed"
    handled = soon(
        lambda: (
            [one[3] for one in engine.one_way] == ["fails", "follows"]
            and any(failed in text for text in logged)
        )
    )
    agree(group, handled, f"{engine.one_way}; {logged}")


def test_a_one_way_message_that_cannot_be_sent_is_not_counted(group, engine, workers, to):
    agent = api._get_current_rpc_agent()
    before = agent.wire.one_way_sent
    with pytest.raises(Exception, match="pickle"):
        agent.engine_messages.send(
            agent.workers.rank_of(to), Kind.AUTOGRAD_NOTICE, threading.Lock()
        )
    assert agent.wire.one_way_sent == before  # the shutdown that follows does not wait for it
    group.barrier()


@pytest.mark.mpi(min_size=2)
def test_the_engine_is_notified_of_a_worker_that_leaves(group, engine):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    last = group.size - 1
    if group.rank == last:
        rpc.shutdown(graceful=False)
        group.barrier()
    else:
        assert soon(lambda: engine.gone)
        agent = api._get_current_rpc_agent()
        raised = None
        try:
            agent.engine_messages.send(last, Kind.AUTOGRAD_NOTICE, "late")
        except RankFailureError as error:
            raised = error
        group.barrier()
        rpc.shutdown(graceful=False)
        assert raised is not None
    agree(group, group.rank == last or engine.gone[0] == last, f"{engine.gone}")
