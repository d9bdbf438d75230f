"""Execution of one node of torch's autograd graph, with its hooks and without the nodes below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node

from mpidist.autograd.recording import Edge, Gradient, Tensor


class _Stop(Exception):
    """Raised by the hook after the node, to end the engine's run."""


def run_alone(
    call: Callable[[Sequence[Edge], Sequence[Tensor], Sequence[Edge]], object],
    node: Node,
    into: list[Edge],
    gradients: list[Tensor],
) -> Sequence[Gradient]:
    """Run one node and return its gradients.

    torch's anomaly mode would report the stop as an error of the node, and would check for NaN only
    after the stop. The mode is off during the call, and this function checks the gradients.

    Args:
        call: Runs torch's engine from edges with gradients to targets.
        node: The node.
        into: Edges into the node.
        gradients: One gradient per edge.

    Raises:
        RuntimeError: In anomaly mode, a gradient has NaN.
    """
    below = [(to, number) for to, number in dict.fromkeys(node.next_functions) if to is not None]
    if not below:
        return [None] * len(node.next_functions)
    yielded: list[Gradient] = []

    def stop(grad_inputs: Sequence[Gradient], grad_outputs: object) -> None:
        yielded.extend(grad_inputs)
        raise _Stop

    is_examined = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    handle = node.register_hook(stop)
    try:
        with _without_anomaly_mode():
            call(into, gradients, below)
    except _Stop:
        pass
    finally:
        handle.remove()
    if is_examined:
        for number, gradient in enumerate(yielded):
            if gradient is not None and bool(gradient.isnan().any()):
                raise RuntimeError(
                    f"Function '{node.name()}' returned nan values in its {number}th output."
                )
    return yielded


def _without_anomaly_mode() -> contextlib.AbstractContextManager[object]:
    if not torch.is_anomaly_enabled():
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(False, torch.is_anomaly_check_nan_enabled())
