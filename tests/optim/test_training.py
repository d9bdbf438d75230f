"""Training of a model split over all workers, with distributed autograd, against one process."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

import mpidist.rpc as rpc
from mpidist import autograd
from mpidist.errors import MpidistError
from mpidist.optim import DistributedOptimizer, functional
from tests.optim import owners
from tests.optim.owners import on_rank_0
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)
ROWS = torch.tensor([1, 4, 4])


class Embedding(torch.nn.Embedding):
    def __init__(self):
        super().__init__(5, 3, sparse=True)
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, 15).view(5, 3))


def forward(rref, value):
    return torch.tanh(rref.local_value()(value))


def forward_there(rref, value):
    return rpc.rpc_sync(rref.owner(), forward, args=(rref, value))


def passed_on(rrefs, value):
    """Call layer after layer, each worker the next."""
    out = forward(rrefs[0], value)
    return (
        rpc.rpc_sync(rrefs[1].owner(), passed_on, args=(rrefs[1:], out)) if len(rrefs) > 1 else out
    )


def square(size):
    made = torch.nn.Linear(size, size)
    with torch.no_grad():
        for number, own in enumerate(made.parameters()):
            own.copy_(torch.linspace(-1, 1 + number, own.numel()).view(own.shape))
    return made


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_layers_on_all_workers(group, workers, name):
    """Includes a scheduler and clipped gradients; each layer calls the next."""

    def run():
        rrefs = [rpc.remote(worker, square, args=(3,)) for worker in workers]
        copies = [square(3) for _ in workers]
        there = DistributedOptimizer(getattr(torch.optim, name), rrefs, lr=0.1)
        own = [parameter for module in copies for parameter in module.parameters()]
        here = getattr(functional, name)(own, lr=0.1)
        schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (there, here)]
        for step in range(3):
            value = torch.linspace(-1, 1, 6).view(2, 3) + step
            out = value
            for module in copies:
                out = torch.tanh(module(out))
            found = torch.autograd.grad(out.square().sum(), own)
            for parameter, gradient in zip(own, found, strict=True):
                parameter.grad = gradient
            norm = torch.nn.utils.clip_grad_norm_(own, 0.5)
            here.step([parameter.grad for parameter in own])
            with autograd.context() as context_id:
                first = rpc.rpc_sync(workers[0], passed_on, args=(rrefs, value))
                autograd.backward(context_id, [first.square().sum()])
                torch.testing.assert_close(there.clip_grad_norm_(context_id, 0.5), norm)
                there.step(context_id)
            for scheduler in schedulers:
                scheduler.step()
        values = [
            value
            for rref in rrefs
            for value in rpc.rpc_sync(rref.owner(), owners.values, args=(rref,))
        ]
        torch.testing.assert_close(values, [parameter.detach() for parameter in own])
        grads = [
            grad
            for rref in rrefs
            for grad in rpc.rpc_sync(rref.owner(), owners.grad_attributes, args=(rref,))
        ]
        assert grads == [None] * len(own)

    on_rank_0(group, run)


def test_embeddings_with_sparse_gradients(group, workers):
    def run():
        rref, copy = rpc.remote(workers[-1], Embedding), Embedding()
        there = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.1)
        here = torch.optim.SGD(copy.parameters(), lr=0.1)
        for _ in range(2):
            here.zero_grad()
            torch.tanh(copy(ROWS)).sum().backward()
            norm = copy.weight.grad.coalesce().values().norm()
            here.step()
            with autograd.context() as context_id:
                autograd.backward(context_id, [forward_there(rref, ROWS).sum()])
                torch.testing.assert_close(there.clip_grad_norm_(context_id, 100.0), norm)
                there.step(context_id)
        torch.testing.assert_close(
            rpc.rpc_sync(workers[-1], owners.values, args=(rref,)), [copy.weight.detach()]
        )

    on_rank_0(group, run)


def test_owners_that_a_pass_has_not_reached(group, workers):
    def run():
        used, unused = (
            rpc.remote(workers[0], square, args=(3,)),
            rpc.remote(workers[-1], square, args=(3,)),
        )
        optimizer = DistributedOptimizer(torch.optim.Adam, [used, unused], lr=0.1)
        with autograd.context() as context_id:
            autograd.backward(context_id, [forward_there(used, torch.ones(2, 3)).sum()])
            optimizer.step(context_id)
        left = rpc.rpc_sync(workers[-1], owners.values, args=(unused,))
        assert all(torch.equal(a, b) for a, b in zip(left, square(3).parameters(), strict=True))
        assert set(optimizer.state_dict()["state"]) == {0, 1}

    on_rank_0(group, run)


def test_a_context_that_has_ended(group, workers):
    def run():
        rref = rpc.remote(workers[-1], square, args=(3,))
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref])
        with autograd.context() as context_id:
            autograd.backward(context_id, [forward_there(rref, torch.ones(2, 3)).sum()])
        for call in (optimizer.step, lambda number: optimizer.clip_grad_norm_(number, 1.0)):
            with pytest.raises(
                MpidistError, match=f"Could not find autograd context with id: {context_id}"
            ):
                call(context_id)
            with pytest.raises(TypeError, match="context_id is the number"):
                call(None)

    on_rank_0(group, run)


def test_each_rank_trains_the_same_layer(group, workers):
    """One server, with all ranks as concurrent trainers: no step is lost."""
    if group.rank == 0:
        _shared.append(rpc.RRef(square(3)))
    group.barrier()
    rref = rpc.rpc_sync(workers[0], shared)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.125)
    text = ""
    try:
        for _ in range(5):
            with autograd.context() as context_id:
                # The loss is linear in the parameters, so the gradient does not depend on the
                # number of earlier steps of others.
                autograd.backward(
                    context_id, [rpc.rpc_sync(workers[0], linear, args=(rref,)).sum()]
                )
                optimizer.step(context_id)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    agree(group, not text, text)
    group.barrier()
    if group.rank == 0:
        _shared.clear()
        changes = [a - b for a, b in zip(square(3).parameters(), owners.values(rref), strict=True)]
        text = (
            ""
            if all(
                torch.allclose(change, change.new_full((), 0.625 * group.size))
                for change in changes
            )
            else f"{changes}"
        )
    agree(group, not text, text)


_shared = []


def shared():
    return _shared[0]


def linear(rref):
    return sum(own.sum() for own in rref.local_value().parameters())
