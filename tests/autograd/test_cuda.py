"""CUDA tensors in distributed autograd: device maps of gradients, and stream order."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.optim import DistributedOptimizer
from tests.tools.support import agree, busy, own_stream

pytestmark = pytest.mark.mpi(min_size=2)

MODES = ["fast", "smart"]
_weights: list[torch.Tensor] = []


class SlowScale(torch.autograd.Function):
    """x → 3x with kernels that still run when the function returns, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        busy(x.device)
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        busy(gradient.device)
        return gradient * 3


def remotely(x):
    return SlowScale.apply(x * _weights[0])


def weight_gradient(context):
    return autograd.get_gradients(context)[_weights[0]].cpu()


@pytest.fixture
def peer(group, target):
    # before it, messages go over the host where ranks share devices
    group.all_reduce(torch.ones(1, device=target))
    options = rpc.RpcBackendOptions(
        device_maps={f"worker{rank}": {target: target} for rank in range(group.size)}
    )
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    _weights[:] = [torch.full((1000,), 2.0, device=target, requires_grad=True)]
    group.barrier()
    yield f"worker{(group.rank + 1) % group.size}"
    rpc.shutdown()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_own_stream", [False, True])
def test_gradients_wait_for_slow_kernels(group, target, peer, mode, is_own_stream):
    x = torch.full((1000,), 5.0, device=target, requires_grad=True)
    stream = own_stream(target) if is_own_stream else contextlib.nullcontext()
    with stream:
        # A context of each pass: FAST mode would wait for gradients of the first pass's tensors.
        for number in (1, 2):
            with autograd.context() as context:
                loss = rpc.rpc_sync(peer, remotely, args=(SlowScale.apply(x),)).sum()
                autograd.backward(context, [loss], mode=mode)
                gradient = autograd.get_gradients(context)[x]
                here = torch.equal(gradient, torch.full_like(x, 3 * 3 * 2.0))
                there = rpc.rpc_sync(peer, weight_gradient, args=(context,))
            agree(
                group,
                here and there.eq(3 * 3 * 5.0).all().item(),
                f"pass {number}: {gradient[:3]} {there[:3]}",
            )
    group.barrier()


def test_another_threads_stream_reads_what_the_pass_has_made(group, target, peer):
    x = torch.full((1_000_000,), 1.0, device=target, requires_grad=True)
    found = []

    def read(context):
        with own_stream(target):
            found.append((autograd.get_gradients(context)[x] * 1).eq(9).all().item())

    with autograd.context() as context:
        autograd.backward(context, [SlowScale.apply(SlowScale.apply(x)).sum()])
        thread = threading.Thread(target=read, args=(context,))
        thread.start()
        thread.join()
    agree(group, found == [True], str(found))


def test_steps_wait_for_gradients(group, target, peer):
    weight = torch.full((1000,), 2.0, device=target, requires_grad=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=1.0)
    with autograd.context() as context:
        autograd.backward(context, [SlowScale.apply(weight).sum()])
        optimizer.step(context)
    agree(group, weight.eq(-1).all().item(), str(weight[:3]))
