"""Errors of ``backward``: invalid input, failing nodes, lost workers, unused results."""

from __future__ import annotations

import time

import pytest
import torch

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.errors import CommTimeout, RankFailureError
from mpidist.rpc import api
from tests.rpc.limits import soon
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)

MODES = ["fast", "smart"]


@pytest.mark.usefixtures("clean")
def test_bad_input_is_refused_in_torchs_words(group, workers, to):
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        good = (x * 2).sum()
        for args, error, text in [
            ((context, None), TypeError, "incompatible function arguments"),
            ((None, [good]), TypeError, "incompatible function arguments"),
            ((context, [1.0]), TypeError, "incompatible function arguments"),
            ((context, []), RuntimeError, "No tensors provided for gradient computation"),
            ((context, [torch.ones(1)]), RuntimeError, "requires_grad not set on"),
            (
                (context, [good, x * 2]),
                RuntimeError,
                "is not a scalar, all roots need to be scalar",
            ),
            (
                (context, [torch.ones(1, requires_grad=True)]),
                RuntimeError,
                "does not have a valid gradient function",
            ),
            (
                (context + 1, [good]),
                RuntimeError,
                f"Could not find autograd context with id: {context + 1}",
            ),
            ((context, [good], False, "slow"), ValueError, "mode is one of"),
        ]:
            with pytest.raises(error, match=text):
                autograd.backward(*args)
        autograd.backward(context, [good])
        assert autograd.get_gradients(context)[x].tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        autograd.backward(context, [good])
    group.barrier()


class TellTale(ValueError):
    """An error of a user-defined type."""


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise TellTale("in the backward pass")


def fail(x):
    return Fails.apply(x)


def then(path, x, function=fail):
    """Call a function on the last worker of a path, through all workers of the path."""
    return (
        rpc.rpc_sync(path[0], then, args=(path[1:], x * 2, function)) * 2 if path else function(x)
    )


def under_way():
    return int(autograd._get_debug_info()["num_current_backward_passes"])


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hops", [0, 1, 3])
def test_an_error_anywhere_ends_the_pass_on_all_workers(group, workers, mode, hops):
    path = [workers[(group.rank + 1 + place) % group.size] for place in range(hops)]
    node = (group.rank + hops) % group.size
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        for _ in range(3):
            loss = then(path, x).sum()
            with pytest.raises(
                RuntimeError, match=f"Error on Node {node}: in the backward pass"
            ) as caught:
                autograd.backward(context, [loss], mode=mode)
            assert type(caught.value.__cause__) is TellTale
        # The context stays usable after an error.
        y = torch.ones(2, requires_grad=True)
        autograd.backward(context, [then(path, y, torch.exp).sum()], mode="smart")
        assert y in autograd.get_gradients(context) and x not in autograd.get_gradients(context)
    group.barrier()
    agree(group, soon(lambda: under_way() == 0), "parts of failed passes are left")


class Interrupts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise SystemExit(3)


def interrupt(x):
    return Interrupts.apply(x)


@pytest.mark.usefixtures("clean")
@pytest.mark.mpi(min_size=2)
def test_what_would_end_a_program_ends_the_pass_and_not_its_worker(group, workers, to):
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, interrupt, args=(x,)).sum()
        with pytest.raises(RuntimeError, match="Error on Node"):
            autograd.backward(context, [loss])
        assert rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 1)).item() == 2
    group.barrier()


@pytest.mark.usefixtures("clean")
def test_fast_mode_names_what_it_waits_for(group, workers, to):
    x = torch.ones(2, 5, requires_grad=True)
    group.barrier()
    rpc._set_rpc_timeout(0.5)
    with autograd.context() as context:
        rpc.rpc_sync(to, torch.mul, args=(x, 2), timeout=20)  # not used
        used = rpc.rpc_sync(to, torch.mul, args=(x, 3), timeout=20)
        with pytest.raises(CommTimeout, match=r'mode="smart"') as caught:
            autograd.backward(context, [used.sum()], retain_graph=True)
        text = str(caught.value)
        assert (
            f"{workers[group.rank]} waits for the gradients of arguments of a call to {to} (shapes "
            "[(2, 5)])" in text
        )
        if group.size > 1:
            assert (
                f"{to} waits for the gradients of the result of a call from {workers[group.rank]}"
                in text
            )
        group.barrier()
        rpc._set_rpc_timeout(20)
        autograd.backward(context, [used.sum()], mode="smart")
        assert autograd.get_gradients(context)[x][0, 0].item() == 3
    group.barrier()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.6)
        return gradient


def slow(x):
    return Slow.apply(Slow.apply(x))


@pytest.mark.usefixtures("clean")
def test_a_pass_may_take_longer_than_a_call(group, workers, to):
    """A node that runs on another worker is progress, although no message arrives here."""
    x = torch.ones(2, requires_grad=True)
    last = workers[(group.rank + 2) % group.size]
    with autograd.context() as context:
        loss = then([to, last], x, slow).sum()
        group.barrier()
        rpc._set_rpc_timeout(0.3)
        autograd.backward(context, [loss])
        rpc._set_rpc_timeout(60)
        assert autograd.get_gradients(context)[x].tolist() == [16, 16]
    group.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_has_left_fails_the_pass_at_once(group, mode):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    last = group.size - 1
    path = [f"worker{rank}" for rank in range(1, group.size)]
    raised, x = None, torch.ones(2, requires_grad=True)
    if group.rank == 0:
        with autograd.context() as context:
            loss = then(path, x, torch.exp).sum()
            group.barrier()
            assert soon(lambda: last in api._get_current_rpc_agent().workers.left)
            try:
                autograd.backward(context, [loss], mode=mode)
            except RuntimeError as error:
                raised = error
    else:
        group.barrier()
        if group.rank == last:
            rpc.shutdown(graceful=False)
    group.barrier()
    if group.rank != last:
        rpc.shutdown(graceful=False)
    agree(
        group,
        group.rank != 0 or (raised is not None and "has left RPC" in str(raised)),
        f"{raised!r}",
    )
    agree(
        group,
        group.rank != 0
        or isinstance(raised, RankFailureError)
        or isinstance(raised.__cause__, RankFailureError),
        f"{raised!r}",
    )


class Leaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        gone.append(1)
        # LEAVE is sent before the calls are stopped, and so before this gradient.
        calls = api._get_current_rpc_agent().calls
        assert soon(lambda: calls.is_stopped)
        return gradient


gone: list[int] = []


def leave(x):
    return Leaves.apply(x)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_leaves_during_a_pass_fails_it_at_once(group, mode):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    gone.clear()
    last = group.size - 1
    path = [f"worker{rank}" for rank in range(1, group.size)]
    raised, x = None, torch.ones(2, requires_grad=True)
    if group.rank == 0:
        with autograd.context() as context:
            loss = then(path, x, leave).sum()
            try:
                autograd.backward(context, [loss], mode=mode)
            except RuntimeError as error:
                raised = error
    elif group.rank == last:
        assert soon(lambda: gone)
        rpc.shutdown(graceful=False)
    group.barrier()
    if group.rank != last:
        rpc.shutdown(graceful=False)
    agree(
        group,
        group.rank != 0 or (raised is not None and "has left RPC" in str(raised)),
        f"{raised!r}",
    )
    agree(group, not int(autograd._get_debug_info()["num_autograd_contexts"]), "contexts are left")


@pytest.mark.usefixtures("clean")
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hops", [0, 1])
def test_a_tensor_of_an_earlier_context_is_named(group, workers, to, mode, hops):
    """A hidden state that is not detached; here, or on the worker that has kept it."""
    w = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        kept = rpc.rpc_sync(to, twice, args=(w,)) if hops == 0 else None
        if hops:
            rpc.rpc_sync(to, keep, args=(group.rank, w))
    group.barrier()
    with autograd.context() as context:
        result = kept * w if hops == 0 else rpc.rpc_sync(to, use_kept, args=(group.rank, w))
        with pytest.raises(RuntimeError, match="received in another autograd context") as caught:
            autograd.backward(context, [result.sum()], mode=mode)
    agree(group, "detach()" in str(caught.value) and "object at 0x" not in str(caught.value))
    _kept.clear()


_kept = {}


def twice(x):
    return x * 2


def keep(caller, x):
    _kept[caller] = x * 1


def use_kept(caller, x):
    return _kept[caller] * x
