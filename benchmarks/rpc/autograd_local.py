"""Planning time of distributed autograd, compared with the local backward pass; no network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpidist.autograd.context import Context
from mpidist.autograd.dependencies import Plan
from mpidist.autograd.local_pass import LocalPass
from mpidist.autograd.recording import Receive, Send, received

Tensor = torch.Tensor
_WIDTH, _BATCH = 64, 16


class _Outlet:
    """Outlet that sends nothing."""

    def send(self, part: LocalPass, node: Any, gradients: list[Any]) -> None:
        """Ignore the gradients of a received tensor."""

    def complete(self, part: LocalPass) -> None:
        """Ignore the end of a part."""


def planning(nodes: int, sources: int, rounds: int) -> dict[str, Any]:
    """Time the plan of a part's backward pass, and the backward pass itself.

    The part is a chain of linear layers on one received tensor: per layer a product, a transposed
    weight, and two leaves. The first source is the end of the chain; the other sources are results
    of inner layers at even distances.

    Args:
        nodes: Approximate number of nodes of the graph.
        sources: Number of sends.
        rounds: Rounds of which the medians are returned.

    Returns:
        The number of nodes and of sources, both times in µs, and the share of planning in their
        sum.

    Raises:
        RuntimeError: The leaves' gradients differ from ``torch.autograd.grad``.
    """
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(nodes // 4)]
    (x,) = received([torch.randn(_BATCH, _WIDTH, requires_grad=True)])
    places = {(len(layers) * (number + 1)) // sources for number in range(sources)}
    hidden, ends = x, []
    for place, layer in enumerate(layers, 1):
        hidden = layer(hidden)
        if place in places:
            ends.append(hidden)
    sends = [Send(1, True, [end]) for end in reversed(ends)]
    gradients = [torch.randn_like(end) for end in reversed(ends)]
    plan_us, pass_us = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        plan = Plan({number: send.next_functions for number, send in enumerate(sends)})
        plan_us.append(1e6 * (time.perf_counter() - start))
        context = Context(1)
        context.receives[x.grad_fn] = Receive(1, 1, False, 1)
        start = time.perf_counter()
        part = LocalPass(_Outlet(), context, 1, True, plan)
        for name, gradient in enumerate(gradients):
            part.deliver(name, [gradient])
        pass_us.append(1e6 * (time.perf_counter() - start))
    _check(layers, list(reversed(ends)), gradients, context)
    planned, run = float(np.median(plan_us)), float(np.median(pass_us))
    return {
        "nodes": len(plan.masks),
        "sources": sources,
        "plan_us": planned,
        "pass_us": run,
        "share": planned / (planned + run),
    }


def _check(
    layers: Sequence[torch.nn.Linear], ends: list[Tensor], gradients: list[Tensor], context: Context
) -> None:
    leaves = [parameter for layer in layers for parameter in layer.parameters()]
    found = context.gradients.all()
    for leaf, right in zip(
        leaves, torch.autograd.grad(ends, leaves, gradients, retain_graph=True), strict=True
    ):
        if not torch.allclose(found[leaf], right, rtol=1e-4, atol=1e-6):
            raise RuntimeError("a part's gradients differ from torch.autograd.grad()")
