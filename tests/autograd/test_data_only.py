"""Passes among workers with lists, without pickles: results, hooks and errors in both modes."""

from __future__ import annotations

import pytest
import torch

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.rpc import api
from mpidist.rpc.values import codec, pickles
from tests.autograd.remote_functions import (
    cube,
    cube_with_hook,
    look_up,
    loss_of,
    weight_gradient,
)
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.parametrize("mode", ["fast", "smart"])]


def by_way_of(others, x):
    """Call along a chain of workers."""
    return rpc.rpc_sync(others[0], by_way_of, args=(others[1:], x * 2)) * 3 if others else cube(x)


def pair(x):
    return {"one": x * 2, "other": (x * 3, [x.double() * 4])}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("in the backward pass")


def failing(x):
    return Fails.apply(x)


def table():
    return torch.nn.Embedding(6, 2, sparse=True)


@pytest.fixture
def to(group, engine, monkeypatch):
    """Start every worker with a list, and fail if RPC pickles; return the next worker's name."""
    made = []

    def no_pickle(*args, **kwargs):
        made.append(args)
        raise AssertionError("a pickle")

    for module, name in [(pickles, "dumps"), (pickles, "loads"), (codec, "encode_pickled")]:
        monkeypatch.setattr(module, name, no_pickle)
    names = [
        by_way_of,
        cube_with_hook,
        pair,
        loss_of,
        failing,
        table,
        look_up,
        weight_gradient,
        torch.mul,
        cube,
    ]
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=names)
    yield f"worker{(group.rank + 1) % group.size}"
    if api._is_current_rpc_agent_set():
        rpc.shutdown()
    agree(group, not made, str(made))
    info = autograd._get_debug_info()
    agree(group, info["num_current_backward_passes"] == "0", str(info))


def test_through_all_workers_and_back(group, to, mode):
    others = [f"worker{(group.rank + 1 + hop) % group.size}" for hop in range(2 * group.size)]
    x = torch.full((3,), 2.0, requires_grad=True)
    with autograd.context() as context:
        loss = by_way_of(others, x).sum()
        autograd.backward(context, [loss], mode=mode)
        found = autograd.get_gradients(context)[x]
        y = x.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(
            ((y * 2 ** len(others)) ** 3 * 3 ** len(others)).sum(), [y]
        )
        assert torch.equal(found, expected)
    group.barrier()


def test_results_in_containers_of_several_types(group, to, mode):
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        found = rpc.rpc_sync(to, pair, args=(x,))
        loss = found["one"].sum() + found["other"][0].sum() + found["other"][1][0].sum()
        autograd.backward(context, [loss], mode=mode)
        assert autograd.get_gradients(context)[x].tolist() == [9, 9]
    group.barrier()


def test_an_output_without_a_gradient_and_a_second_pass(group, to, mode):
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        found = rpc.rpc_sync(to, pair, args=(x,))
        for times in (1, 2):
            autograd.backward(context, [found["one"].sum()], retain_graph=True, mode=mode)
            assert autograd.get_gradients(context)[x].tolist() == [2 * times] * 2
    group.barrier()


def test_hooks_that_call_other_workers(group, to, mode):
    x = torch.full((2,), 2.0, requires_grad=True)
    with autograd.context() as context:
        hidden = x * 1
        hidden.register_hook(lambda gradient: rpc.rpc_sync(to, torch.mul, args=(gradient, 2)))
        came = rpc.rpc_sync(to, cube_with_hook, args=(f"worker{group.rank}", hidden))
        autograd.backward(context, [came.sum()], mode=mode)
        assert autograd.get_gradients(context)[x].tolist() == [12.0 * 2 * 3] * 2
    group.barrier()


def test_a_pass_from_a_reference_to_the_loss(group, to, mode):
    x = torch.full((2,), 2.0, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.remote(to, loss_of, args=(x,))
        loss.backward(context, mode=mode)
        assert autograd.get_gradients(context)[x].tolist() == [12, 12]
    del loss
    group.barrier()


def test_sparse_gradients(group, to, mode):
    own = torch.nn.Embedding(6, 2, sparse=True)
    with autograd.context() as context:
        rows = rpc.rpc_sync(to, torch.mul, args=(own(torch.tensor([1, 1, 4])), 2))
        reference = rpc.remote(to, table)
        there = rpc.rpc_sync(to, look_up, args=(reference, torch.tensor([0, 5])))
        autograd.backward(context, [rows.sum(), there.sum()], mode=mode)
        assert autograd.get_gradients(context)[own.weight].to_dense()[:, 0].tolist() == [
            0,
            4,
            0,
            0,
            2,
            0,
        ]
        other = rpc.rpc_sync(to, weight_gradient, args=(context, reference))
        assert other.is_sparse and other.to_dense()[:, 0].tolist() == [1, 0, 0, 0, 0, 1]
    del reference
    group.barrier()


def test_errors_come_back_as_data(group, to, mode):
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, failing, args=(x,)).sum()
        with pytest.raises(
            RuntimeError, match=r"Error on Node \d+: in the backward pass"
        ) as caught:
            autograd.backward(context, [loss], mode=mode)
        assert type(caught.value.__cause__) is ZeroDivisionError
    group.barrier()
