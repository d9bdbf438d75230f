"""Random graphs of calls over ranks, compared with the same graphs in one process.

The graphs have shared weights, tensor hooks and unused results.
"""

from __future__ import annotations

import random

import torch

import mpidist.autograd as autograd
import mpidist.rpc as rpc

weights: dict[int, torch.Tensor] = {}
hook_runs = [0]


def weight(worker):
    """Return a worker's weight: the same on every rank."""
    if worker not in weights:
        generator = torch.Generator().manual_seed(worker)
        made = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()
        # setdefault is atomic: of handlers that run at once, all must use the same tensor.
        return weights.setdefault(worker, made)
    return weights[worker]


def squared(gradient):
    hook_runs[0] += 1
    # Not linear, so a hook that receives only a part of its gradient gives a wrong result.
    return gradient * gradient.abs() / 4


def invoke(is_local, to, *args):
    if is_local:
        return work(*args)
    return (
        rpc.rpc_sync(to, work, args=args)
        if args[2] % 3
        else rpc.remote(to, work, args=args).to_here()
    )


def work(size, worker, seed, depth, is_local, hooks, unused, *xs):
    """Compute on one worker, which may call other workers and itself."""
    hidden = torch.tanh(sum(xs) @ weight(worker))
    if hooks and seed % 3 == 0:
        hidden.register_hook(squared)
    if depth:
        other = (worker + 1 + seed) % size
        back = invoke(
            is_local,
            other,
            size,
            other,
            seed // 3,
            depth - 1,
            is_local,
            hooks,
            unused,
            hidden,
            xs[0],
        )
        hidden = hidden + back
    if seed % 5 == 0 and unused and not is_local:
        other = (worker + 1) % size
        invoke(False, other, size, other, 1, 0, False, hooks, False, hidden)
    return hidden * xs[-1] if seed % 2 else hidden


def loss_of(seed, size, is_local, hooks, unused, x):
    rng = random.Random(seed)
    values = [x, x * 2]
    for _ in range(rng.randint(2, 6)):
        args = [
            values[place]
            for place in {rng.randrange(len(values)) for _ in range(1 + rng.randrange(3))}
        ]
        worker = rng.randrange(size)
        values.append(
            invoke(
                is_local,
                worker,
                size,
                worker,
                rng.randrange(30),
                rng.randrange(3),
                is_local,
                hooks,
                unused,
                *args,
            )
        )
    # Several roots that use all values, because FAST mode awaits all gradients.
    return [sum(value.sum() for value in values[::2]), sum(value.sum() for value in values[1::2])]


def my_gradient(context, worker):
    return autograd.get_gradients(context).get(weight(worker))


def complaint(seed, size, mode, hooks=False, unused=False):
    """Run a graph on all workers and in this process, twice in one context; return differences."""
    x = torch.randn(
        2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()
    roots = loss_of(seed, size, True, hooks, unused, x)
    inputs = [x, *(weight(worker) for worker in range(size))]
    expected = torch.autograd.grad(
        roots, inputs, [torch.ones_like(root) for root in roots], allow_unused=True
    )
    with autograd.context() as context:
        roots = loss_of(seed, size, False, hooks, unused, x)
        autograd.backward(context, roots, retain_graph=True, mode=mode)
        autograd.backward(context, roots, mode=mode)
        found = [autograd.get_gradients(context).get(x)]
        found += [
            rpc.rpc_sync(worker, my_gradient, args=(context, worker)) for worker in range(size)
        ]
    for name, one, other in zip(["x", *range(size)], expected, found, strict=True):
        if (one is None) != (other is None) or (
            one is not None and not torch.allclose(2 * one, other)
        ):
            return (
                f"seed {seed}, {mode}, hooks {hooks}, unused {unused}, {name}: expected {one}, "
                f"half of {other}"
            )
    return ""
