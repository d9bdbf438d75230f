"""Owner's side of ``DistributedOptimizer``: the functions that its messages name.

A worker with a list of what may be called here (``init_rpc(..., allowed=[...])``) allows them all
by the one entry ``"mpidist.optim.local"``. The optimizers of ``mpidist.optim.functional`` go by a
string; all other classes must be in the list, too.

Each function checks what it is given (``local_optimizer``): exact references to values of this
worker, numbers, settings by name. A trainer updates the parameters and the optimizers that it has
references to; no name in a message leads to an attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpidist.optim import gradients, local_optimizer
from mpidist.optim.local_optimizer import LocalOptimizer
from mpidist.rpc.rref import RRef


def make(named: Any, is_functional: bool, groups: Any, args: Any, kwargs: Any) -> Any:
    """Make this worker's optimizer.

    Args:
        named: A class, or the name of one in ``mpidist.optim.functional``.
        is_functional: Its ``step`` takes gradients.
        groups: Of references owned here, each with settings.
        args: The class's further arguments.
        kwargs: The class's further arguments.

    Returns:
        A reference to it; for each group, how many parameters each reference stands for; the
        settings of each group; the class's defaults.

    Raises:
        TypeError: A reference to something else, or arguments that the class does not take.
        MpidistError: This worker's list has no such class.
        Exception: What the class raises.
    """
    local = LocalOptimizer(named, is_functional, groups, args, kwargs)
    return (
        RRef(local),
        local.counts,
        local.settings(),
        dict(getattr(local.optimizer, "defaults", {})),
    )


def add_group(optimizer: Any, references: Any, settings: Any) -> Any:
    """Add a group; return how many parameters each reference has, and the group's settings."""
    local = local_optimizer.of(optimizer)
    local.add(references, settings)
    return local.counts[-1], local.settings()[-1]


def remove_group(optimizer: Any) -> None:
    """Remove the group that was added last, as another worker could not add its part."""
    local_optimizer.of(optimizer).remove_last()


def step(optimizer: Any, context_id: int, changes: Any) -> None:
    """Update the parameters with a context's gradients.

    Blocks: while another optimizer updates one of these parameters.

    Args:
        optimizer: The reference to this worker's optimizer.
        context_id: The context; parameters without a gradient in it are left alone.
        changes: Settings that have changed since the last step, by the group's number here.
    """
    local = local_optimizer.of(optimizer)
    found = gradients.of_parameters(context_id, local.parameters)
    local.change(changes)
    local.optimizer.step(found)


def state(optimizer: Any) -> dict[int, Any]:
    """Return a copy of each parameter's state, on the CPU, by the parameter's number here."""
    local = local_optimizer.of(optimizer)
    locks = getattr(local.optimizer, "locks", None)
    if locks is None:
        return _copied(local.own("state_dict")()["state"])
    with locks:
        return _copied(local.optimizer.state_dict()["state"])


def load_state(optimizer: Any, state: Any, settings: Any) -> None:
    """Load each parameter's state, by its number here, and each group's settings."""
    local_optimizer.of(optimizer).load(state, settings)


def gradient_norms(optimizer: Any, context_id: int, norm_type: float) -> torch.Tensor:
    """Return the norm of each parameter's gradient, of those that have one in a context."""
    found = gradients.of_parameters(context_id, local_optimizer.of(optimizer).parameters)
    return gradients.norms(found, _number(norm_type))


def scale_gradients(optimizer: Any, context_id: int, factor: float) -> None:
    """Multiply a context's gradients of the parameters, in place."""
    found = gradients.of_parameters(context_id, local_optimizer.of(optimizer).parameters)
    gradients.scale(found, _number(factor))


def _number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"a norm's type and a factor are numbers; got a {type(value).__qualname__}")
    return float(value)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value
