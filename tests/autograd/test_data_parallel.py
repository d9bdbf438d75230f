"""Data-parallel modules in distributed autograd: averaged gradients; local ones of other leaves."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.autograd.api import _engine
from mpidist.ddp import DistributedDataParallel
from mpidist.ddp.hooks.default import fp16_compress_hook
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("clean")]

_remote_weight: list[torch.Tensor] = []
SIZE = 6


@pytest.fixture(autouse=True)
def remote_weight(group):
    """Set a different weight on each worker, with values known to all."""
    _remote_weight[:] = [weight_of(group.rank).requires_grad_()]
    group.barrier()
    yield _remote_weight[0]
    group.barrier()


def weight_of(rank):
    return (
        torch.randn(
            SIZE, SIZE, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64
        )
        / 2
    )


def multiplied(x):
    return torch.tanh(x @ _remote_weight[0])


class Net(nn.Module):
    """Layers before and after a call to another worker; both use the first weight."""

    def __init__(self, to, tied):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) / 2 for _ in range(4)
        )
        self.to_worker, self.tied = to, tied

    def forward(self, x, call=None):
        first, second, third, last = self.weights
        x = torch.tanh(torch.tanh(x @ first) @ second)
        if self.to_worker is not None:
            x = rpc.rpc_sync(self.to_worker, multiplied, args=(x,))
        elif call is not None:
            x = call(x)
        x = torch.relu(x @ third) + x
        return x @ (first.t() if self.tied else last)


def inputs_of(rank, step=0):
    return torch.randn(
        3 + rank,
        SIZE,
        generator=torch.Generator().manual_seed(10 * step + rank),
        dtype=torch.float64,
    )


def expected(group, tied, outside, step=0):
    """Gradients of each rank's weights and remote weight, computed in one process."""
    by_rank = []
    for rank in range(group.size):
        net, remote = Net(None, tied), weight_of((rank + 1) % group.size).requires_grad_()
        call = lambda x, remote=remote: torch.tanh(x @ remote)  # noqa: E731
        out = call(net(inputs_of(rank, step))) if outside else net(inputs_of(rank, step), call)
        out.square().sum().backward()
        by_rank.append(([weight.grad for weight in net.weights], remote.grad))
    return by_rank


def average(by_rank):
    columns = zip(*[gradients for gradients, _ in by_rank], strict=True)
    return [None if column[0] is None else torch.stack(column).mean(0) for column in columns]


def my_gradient(context):
    return autograd.get_gradients(context)[_remote_weight[0]]


@pytest.mark.parametrize("mode", ["fast", "smart"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("outside", [False, True], ids=["call inside", "call outside"])
@pytest.mark.parametrize("views", [False, True], ids=["", "views"])
def test_gradients_are_averages_in_the_context(group, workers, to, mode, tied, outside, views):
    net = Net(None if outside else to, tied)
    model = DistributedDataParallel(
        net,
        process_group=group,
        gradient_as_bucket_view=views,
        bucket_cap_mb=1e-3,
        find_unused_parameters=tied,
    )
    sentinel = [torch.full_like(weight, 7.0) for weight in net.weights]
    for weight, held in zip(net.weights, sentinel, strict=True):
        weight.grad = held.clone()
    good, seen = True, ""
    for step in range(3):
        by_rank = expected(group, tied, outside, step)
        wanted = average(by_rank)
        passes = 1 + (step == 1)
        with autograd.context() as context:
            out = model(inputs_of(group.rank, step))
            out = rpc.rpc_sync(to, multiplied, args=(out,)) if outside else out
            loss = out.square().sum()
            for _ in range(passes):
                autograd.backward(context, [loss], retain_graph=passes > 1, mode=mode)
            found = autograd.get_gradients(context)
            remote = rpc.rpc_sync(to, my_gradient, args=(context,))
        for weight, want in zip(net.weights, wanted, strict=True):
            got = found.get(weight)
            if (want is None) != (got is None) or (
                want is not None and not torch.allclose(got, passes * want)
            ):
                good, seen = False, f"step {step}: {got}, expected {want}"
        if not torch.allclose(remote, passes * by_rank[group.rank][1]):
            good, seen = False, f"step {step}: remote {remote}"
    untouched = all(
        torch.equal(weight.grad, held) for weight, held in zip(net.weights, sentinel, strict=True)
    )
    agree(group, good and untouched, f"{seen}; .grad untouched: {untouched}")


def test_a_local_pass_averages_as_ever_within_a_context_and_after_it(group, workers, to):
    net = Net(None, False)
    model = DistributedDataParallel(net, process_group=group)
    wrong = []
    for step, within in enumerate([True, False, True]):
        wanted = average(expected_locally(group, step))
        with autograd.context() if within else contextlib.nullcontext() as context:
            loss = model(inputs_of(group.rank, step)).square().sum()
            if step < 2:
                net.zero_grad()
                loss.backward()
                found = [weight.grad for weight in net.weights]
            else:
                autograd.backward(context, [loss])
                gradients = autograd.get_gradients(context)
                found = [gradients[weight] for weight in net.weights]
        wrong += [
            (step, place)
            for place, (got, want) in enumerate(zip(found, wanted, strict=True))
            if got is None or not torch.allclose(got, want)
        ]
    agree(group, not wrong, f"(step, weight): {wrong}")


def expected_locally(group, step=0, ranks=None):
    by_rank = []
    for rank in range(group.size) if ranks is None else ranks:
        net = Net(None, False)
        net(inputs_of(rank, step)).square().sum().backward()
        by_rank.append(([weight.grad for weight in net.weights], None))
    return by_rank


def test_under_no_sync_gradients_stay_the_ranks_own(group, workers):
    net = Net(None, False)
    model = DistributedDataParallel(net, process_group=group)
    (own, _) = expected_locally(group, ranks=[group.rank])[0]
    with autograd.context() as context:
        with model.no_sync():
            loss = model(inputs_of(group.rank)).square().sum()
        autograd.backward(context, [loss])
        found = autograd.get_gradients(context)
        agree(
            group,
            all(torch.allclose(found[w], g) for w, g in zip(net.weights, own, strict=True)),
            str(found),
        )


@pytest.mark.mpi(min_size=2)
def test_unused_parameters_and_hooks(group, workers):
    """One rank skips a layer; a layer that all ranks skip has no gradient."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x, used):
            return sum(self.layers[place](x) for place in used)

    torch.manual_seed(0)
    net = Parts()
    model = DistributedDataParallel(net, process_group=group, find_unused_parameters=True)
    model.register_comm_hook(None, fp16_compress_hook)
    for _ in range(2):
        with autograd.context() as context:
            loss = model(torch.ones(1, 2), [0, 1] if group.rank == 0 else [0]).sum()
            autograd.backward(context, [loss])
            found = {
                name: autograd.get_gradients(context).get(one)
                for name, one in net.named_parameters()
            }
        assert found["layers.2.weight"] is None and found["layers.2.bias"] is None
        share = torch.full((2,), 1 / group.size)
        agree(group, torch.allclose(found["layers.0.bias"], torch.ones(2)), str(found))
        agree(group, torch.allclose(found["layers.1.bias"], share, rtol=1e-3), str(found))
    group.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_parameter_without_a_gradient_fails_the_pass_and_the_next_goes_on(group, workers):
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, both):
            return self.net[0](x) + (self.net[1](x) if both else 0)

    model = DistributedDataParallel(Two(), process_group=group)
    with autograd.context() as context, pytest.raises(RuntimeError, match=r"net[.]1[.]weight"):
        autograd.backward(context, [model(torch.ones(1, 2), False).sum()])
    with autograd.context() as context:
        autograd.backward(context, [model(torch.ones(1, 2), True).sum()])
        found = autograd.get_gradients(context)
        agree(group, all(one in found for one in net.parameters()), str(found))
    assert all(one.grad is None for one in net.parameters())


@pytest.mark.mpi(min_size=2)
def test_uneven_inputs(group, workers):
    net = Net(None, False)
    model = DistributedDataParallel(net, process_group=group)
    wrong = []
    with model.join():
        for step in range(1 + group.rank):
            with autograd.context() as context:
                loss = model(inputs_of(group.rank, step)).square().sum()
                autograd.backward(context, [loss])
                found = autograd.get_gradients(context)
            ranks = [rank for rank in range(group.size) if rank >= step]
            by_rank = expected_locally(group, step, ranks)
            wanted = [one * len(ranks) / group.size for one in average(by_rank)]
            wrong += [
                step
                for weight, want in zip(net.weights, wanted, strict=True)
                if not torch.allclose(found[weight], want)
            ]
    agree(group, not wrong, f"steps {wrong}")


def test_sparse_gradients(group, workers):
    net = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
    model = DistributedDataParallel(net, process_group=group)
    for _ in range(2):
        with autograd.context() as context:
            autograd.backward(context, [model(torch.tensor([[group.rank % 5, 4]])).sum()])
            found = autograd.get_gradients(context)[net.weight]
        wanted = torch.zeros(5, 2)
        for rank in range(group.size):
            wanted[[rank % 5, 4]] += 1 / group.size
        agree(group, found.is_sparse and torch.allclose(found.to_dense(), wanted), str(found))


def test_two_passes_at_once_through_one_module_are_refused(group, workers):
    model = DistributedDataParallel(Net(None, False), process_group=group)
    with autograd.context() as context:
        loss = model(inputs_of(group.rank)).square().sum()
        (reduction,) = _engine.contexts.require(context).reductions.values()
        reduction.open()
        with pytest.raises(RuntimeError, match="two passes at once"):
            autograd.backward(context, [loss])
        reduction.close()
        autograd.backward(context, [loss])
        assert len(autograd.get_gradients(context)) == 4
    group.barrier()


_models: list[DistributedDataParallel] = []


def run_model(x):
    return _models[0](x)


def open_reductions(context, is_open):
    for reduction in _engine.contexts.require(context).reductions.values():
        reduction.open() if is_open else reduction.close()


@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_a_module_of_another_worker_that_is_in_a_pass_already_fails_the_pass(
    group, workers, to, mode
):
    """In SMART mode a notice without an answer begins the part; errors must reach the initiator."""
    _models[:] = [
        DistributedDataParallel(nn.Linear(SIZE, 2), process_group=group.split(group.rank))
    ]
    rpc.api._set_rpc_timeout(2)
    group.barrier()
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, run_model, args=(torch.ones(1, SIZE, requires_grad=True),)).sum()
        rpc.rpc_sync(to, open_reductions, args=(context, True))
        with pytest.raises(RuntimeError, match=r"two passes at once"):
            autograd.backward(context, [loss], mode=mode)
        rpc.rpc_sync(to, open_reductions, args=(context, False))
        autograd.backward(context, [loss], mode=mode)
    group.barrier()
    _models.clear()


def test_a_pass_that_failed_is_not_the_beginning_of_the_next_one(group, workers):
    net = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False))
    ddp, is_on = DistributedDataParallel(net, process_group=group), True

    def give_up(gradient):
        if is_on:
            raise KeyError("gave up")

    # Autograd has passed the gradient of the last layer by then.
    net[0].register_forward_hook(lambda module, args, out: out.register_hook(give_up) and None)
    with pytest.raises(Exception, match="gave up"), autograd.context() as context:
        autograd.backward(context, [ddp(torch.ones(1, SIZE)).sum()])
    is_on = False
    group.barrier()
    own = torch.full((1, SIZE), 1.0 + group.rank)
    with ddp.no_sync():
        ddp(own).sum().backward()
    found = net[1].weight.grad.clone()
    net.zero_grad()
    net(own).sum().backward()
    agree(group, torch.equal(found, net[1].weight.grad), str(found[0]))
