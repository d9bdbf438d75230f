"""One worker's part of a pass: random graphs, order of sources, cuts, hooks, engine calls."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from mpidist.autograd.context import Context
from mpidist.autograd.dependencies import Plan
from mpidist.autograd.local_pass import LocalPass
from mpidist.autograd.recording import Receive, Send, received


class Recording:
    """An outlet that records a part's results."""

    def __init__(self):
        self.sent, self.completed = {}, 0

    def send(self, part, node, gradients):
        assert node not in self.sent, "the gradients of a received tensor go once"
        self.sent[node] = gradients

    def complete(self, part):
        self.completed += 1


def part_of(context, sources, outlet=None, awaited=None, retain=True):
    sends = [Send(1, True, tensors) for tensors in sources]
    plan = Plan({place: send.next_functions for place, send in enumerate(sends, 1)})
    return LocalPass(outlet or Recording(), context, 5, retain, plan, awaited)


def arrival(context, tensors, message):
    came = received([tensor.detach().requires_grad_() for tensor in tensors])
    context.receives[came[0].grad_fn] = Receive(message, 1, False, len(came))
    return came


class Once(torch.autograd.Function):
    """Counts its backward calls; a second call on one graph is refused."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Once.runs += 1
        return gradient * 1


def random_graph(rng, context, hooks):
    """Return leaves, received tensors by message, outputs and hook log of a random graph."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def make():
        return torch.randn(2, 2, dtype=torch.float64, generator=generator)

    leaves = [make().requires_grad_() for _ in range(rng.randint(1, 3))]
    came = {
        message: arrival(context, [make() for _ in range(rng.randint(1, 2))], message)
        for message in range(rng.randint(0, 3))
    }
    values = leaves + [tensor for tensors in came.values() for tensor in tensors]
    used, count = [], 0
    for _ in range(rng.randint(3, 30)):
        first, second = rng.choice(values), rng.choice(values[-4:])
        kind = rng.randrange(5)
        if kind == 0:
            made = torch.tanh(first @ second)
        elif kind == 1:
            made = first + second
        elif kind == 2:
            made = Once.apply(first)
            count += 1
        elif kind == 3:
            made = (first * second).sin()
        else:
            made = torch.cat([first, second], 1).split(2, 1)[rng.randrange(2)]
        if hooks and rng.random() < 0.4 and made.grad_fn is not None:
            made.register_hook(
                lambda gradient, log=used: (log.append(1), gradient * gradient.abs())[1]
            )
        values.append(made)
    if hooks:
        for leaf in leaves:
            if rng.random() < 0.5:
                leaf.register_hook(lambda gradient, log=used: (log.append(1), gradient * 2 + 1)[1])
    outputs = [
        [rng.choice(values) for _ in range(rng.randint(1, 2))] for _ in range(rng.randint(1, 5))
    ]
    return leaves, came, outputs, used


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_equal_one_call_of_torch(seed, hooks):
    rng, context = random.Random(seed), Context(1)
    leaves, came, outputs, log = random_graph(rng, context, hooks)
    given = [
        [torch.randn(2, 2, dtype=torch.float64) if rng.random() < 0.9 else None for _ in one]
        for one in outputs
    ]
    received_tensors = [tensor for tensors in came.values() for tensor in tensors]
    pairs = [
        pair
        for one, some in zip(outputs, given, strict=True)
        for pair in zip(one, some, strict=True)
        if pair[1] is not None
    ]
    inputs = [*leaves, *received_tensors]
    Once.runs = 0
    log.clear()
    expected = [None] * len(inputs)
    if pairs:
        roots, gradients = zip(*pairs, strict=True)
        expected = torch.autograd.grad(roots, inputs, gradients, True, allow_unused=True)
    once, hooked = Once.runs, len(log)
    Once.runs = 0
    log.clear()
    outlet = Recording()
    part = part_of(context, outputs, outlet)
    order = list(range(len(outputs)))
    rng.shuffle(order)
    for place in order:
        assert outlet.completed == 0
        part.deliver(place + 1, given[place])
    assert outlet.completed == 1
    assert (Once.runs, len(log)) == (once, hooked), "every node and every hook runs once"
    sums = context.gradients.all()
    found = [sums.get(leaf) for leaf in leaves]
    for tensors in came.values():
        found += outlet.sent.get(tensors[0].grad_fn, [None] * len(tensors))
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other)


def test_a_tied_weight_below_a_skip_connection_with_hooks_that_are_not_linear():
    """At such a cut torch's engine alone would run hooks on a part of the gradient."""
    log, context = [], Context(1)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    weight.register_hook(lambda gradient: gradient.abs())
    hidden = torch.tanh(torch.randn(2, 3, dtype=torch.float64) @ weight)
    hidden.register_hook(lambda gradient: (log.append(gradient), gradient * gradient)[1])
    (back,) = arrival(context, [torch.randn(2, 3, dtype=torch.float64)], 9)
    loss = ((back + hidden) @ weight.t()).square().sum()
    (expected,) = torch.autograd.grad(
        [loss, hidden], [weight], [torch.ones_like(loss), torch.ones_like(hidden)], True
    )
    log.clear()
    outlet = Recording()
    part = part_of(context, [[loss], [hidden]], outlet)
    part.deliver(1, [torch.ones_like(loss)])
    assert list(outlet.sent) == [back.grad_fn] and not log and not context.gradients.all()
    part.deliver(2, [torch.ones_like(hidden)])
    assert outlet.completed == 1 and len(log) == 1
    assert torch.allclose(context.gradients.all()[weight], expected)


def test_only_the_nodes_above_a_cut_with_care_run_one_by_one():
    context, outlet = Context(1), Recording()
    weight = torch.ones(3, requires_grad=True)
    hidden = torch.tanh(weight)
    (back,), (other,) = arrival(context, [torch.ones(3)], 9), arrival(context, [torch.ones(3)], 8)
    for _ in range(50):
        other = other * weight
    loss = ((back + hidden) * other).sum()
    part = part_of(context, [[loss], [hidden]], outlet)
    calls = []
    call, part._call = part._call, lambda *args: (calls.append(1), call(*args))[1]
    part.deliver(1, [torch.ones(())])
    # sum, product and addition; all of the rest
    assert len(outlet.sent) == 2 and len(calls) == 3 + 1
    part.deliver(2, [torch.ones(3)])
    assert len(calls) == 3 + 2 and outlet.completed == 1
    slope = 1 - torch.tanh(torch.ones(3)) ** 2
    assert torch.allclose(
        context.gradients.all()[weight], 2 * slope + 50 * (1 + torch.tanh(torch.ones(3)))
    )


def test_nothing_runs_before_it_must():
    """Without received tensors, one call of torch's engine runs all nodes."""
    context = Context(1)
    weight = torch.ones(2, requires_grad=True)
    calls = []
    outputs = [[weight * 2], [weight * 3]]
    part = part_of(context, outputs)
    call, part._call = part._call, lambda *args: (calls.append(1), call(*args))[1]
    part.deliver(2, [torch.ones(2)])
    assert not calls
    part.deliver(1, [torch.ones(2)])
    assert calls == [1] and context.gradients.all()[weight].tolist() == [5, 5]


def test_sources_that_are_not_awaited_do_not_run():
    context, outlet = Context(1), Recording()
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (used,), (unused,) = arrival(context, [torch.ones(2)], 1), arrival(context, [torch.ones(2)], 2)
    part = part_of(context, [[weight * used], [other * unused]], outlet, awaited=[1])
    assert part.missing() == [1]
    part.deliver(1, [torch.ones(2)])
    assert (
        outlet.completed == 1
        and list(outlet.sent) == [used.grad_fn]
        and list(context.gradients.all()) == [weight]
    )


def test_an_undefined_gradient_is_passed_on_as_one():
    context, outlet = Context(1), Recording()
    weight = torch.ones(2, requires_grad=True)
    first, second = arrival(context, [torch.ones(2), torch.ones(2)], 1)
    part = part_of(context, [[weight * first, weight * second]], outlet)
    part.deliver(1, [torch.ones(2), None])
    assert outlet.sent[first.grad_fn][1] is None and outlet.sent[first.grad_fn][0].tolist() == [
        1,
        1,
    ]
    outlet = Recording()
    part = part_of(context, [[weight * first, weight * second]], outlet)
    part.deliver(1, [None, None])
    assert outlet.sent[first.grad_fn] == [None, None] and outlet.completed == 1


def test_a_stopped_part_yields_nothing():
    context, outlet = Context(1), Recording()
    weight = torch.ones(2, requires_grad=True)
    (came,) = arrival(context, [torch.ones(2)], 1)
    product = weight * came
    part = part_of(context, [[product]], outlet)
    product.register_hook(lambda gradient: part.stop())
    part.deliver(1, [torch.ones(2)])
    assert not outlet.sent and not outlet.completed and not context.gradients.all()


def test_a_thread_that_brings_gradients_leaves_them_to_the_one_that_runs():
    context, outlet = Context(1), Recording()
    (first,), (second,) = arrival(context, [torch.ones(2)], 1), arrival(context, [torch.ones(2)], 2)
    product = first * 2
    part = part_of(context, [[product], [second * 2]], outlet)
    threads = set()

    def meanwhile(gradient):
        thread = threading.Thread(target=part.deliver, args=(2, [torch.ones(2)]))
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and second.grad_fn not in outlet.sent

    product.register_hook(meanwhile)
    second.register_hook(lambda gradient: threads.add(threading.current_thread()))
    part.deliver(1, [torch.ones(2)])
    assert threads == {threading.current_thread()} and outlet.completed == 1


def test_sparse_and_dense_gradients_meet_at_a_cut():
    context, outlet = Context(1), Recording()
    table = torch.ones(4, 2, requires_grad=True)
    (came,) = arrival(context, [torch.ones(2, 2)], 1)
    looked_up = torch.nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True)
    part = part_of(context, [[looked_up * came], [table * 2]], outlet)
    part.deliver(1, [torch.ones(2, 2)])
    part.deliver(2, [torch.ones(4, 2)])
    assert context.gradients.all()[table].tolist() == [[2, 2], [3, 3], [2, 2], [3, 3]]
