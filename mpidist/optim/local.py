"""Owner's side of ``DistributedOptimizer``: the functions that its messages call.

A worker with an allowlist (``init_rpc(..., allowed=[...])``) allows them all by the entry
``"mpidist.optim.local"``. Messages name the optimizers of ``mpidist.optim.functional`` by strings;
the allowlist must also contain any other class. A trainer can update only parameters and optimizers
that it has references to. No name in a message is used as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from mpidist.comm.memory import host_values
from mpidist.optim import gradients, local_optimizer
from mpidist.optim.local_optimizer import LocalOptimizer
from mpidist.optim.param_groups import Group
from mpidist.optim.registry import FunctionalClass
from mpidist.rpc.rref import RRef


def make(
    named: str | FunctionalClass | type[torch.optim.Optimizer],
    is_functional: bool,
    groups: Sequence[Group],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[RRef[LocalOptimizer], list[list[int]], list[dict[str, object]], dict[str, object]]:
    """Make this worker's optimizer.

    Args:
        named: A class, or the name of one in ``mpidist.optim.functional``.
        is_functional: The class's ``step`` takes gradients.
        groups: Lists of references owned here, each with settings.
        args: The class's further arguments.
        kwargs: The class's further arguments.

    Returns:
        A reference to the optimizer; for each group, the number of parameters of each reference;
        the settings of each group; the class's defaults.

    Raises:
        TypeError: A reference to another type, or arguments that the class does not take.
        Exception: An error of the class.
    """
    local = LocalOptimizer(named, is_functional, groups, args, kwargs)
    return (
        RRef(local),
        local.counts,
        local.settings(),
        dict(getattr(local.optimizer, "defaults", {})),
    )


def add_group(
    optimizer: RRef[LocalOptimizer],
    references: Sequence[RRef[object]],
    settings: Mapping[str, object],
) -> tuple[list[int], dict[str, object]]:
    """Add a group; return the number of parameters of each reference, and the group's settings."""
    local = local_optimizer.of(optimizer)
    local.add(references, settings)
    return local.counts[-1], local.settings()[-1]


def remove_group(optimizer: RRef[LocalOptimizer]) -> None:
    """Remove the last added group, after another worker could not add its part."""
    local_optimizer.of(optimizer).remove_last()


def step(
    optimizer: RRef[LocalOptimizer], context_id: int, changes: Mapping[int, Mapping[str, object]]
) -> None:
    """Update the parameters with a context's gradients.

    Blocks: while another optimizer updates one of these parameters.

    Args:
        optimizer: The reference to this worker's optimizer.
        context_id: The context; parameters without a gradient in it do not change.
        changes: Settings that changed since the last step, by this worker's group numbers.
    """
    local = local_optimizer.of(optimizer)
    found = gradients.of_parameters(context_id, local.parameters)
    local.change(changes)
    local.optimizer.step(found)


def state(optimizer: RRef[LocalOptimizer]) -> dict[int, object]:
    """Return a copy of each parameter's state on the CPU, by this worker's numbers."""
    local = local_optimizer.of(optimizer)
    locks = getattr(local.optimizer, "locks", None)
    with nullcontext() if locks is None else locks:
        return _copied(local.attribute("state_dict")()["state"])


def load_state(
    optimizer: RRef[LocalOptimizer],
    state: Mapping[int, Mapping[str, object]],
    settings: Sequence[Mapping[str, object]],
) -> None:
    """Load each parameter's state, by this worker's numbers, and each group's settings."""
    local_optimizer.of(optimizer).load(state, settings)


def gradient_norms(
    optimizer: RRef[LocalOptimizer], context_id: int, norm_type: float
) -> torch.Tensor:
    """Return the norms of the parameters' gradients in a context."""
    found = gradients.of_parameters(context_id, local_optimizer.of(optimizer).parameters)
    return gradients.norms(found, norm_type)


def scale_gradients(optimizer: RRef[LocalOptimizer], context_id: int, factor: float) -> None:
    """Multiply a context's gradients of the parameters, in place."""
    found = gradients.of_parameters(context_id, local_optimizer.of(optimizer).parameters)
    gradients.scale(found, factor)


def _copied(value: Any) -> Any:
    """Return a copy with tensors in host memory; lists, tuples and dicts are copied as well."""
    tensors: list[torch.Tensor] = []
    _with_tensors(value, tensors.append)
    copies = iter(host_values.copies_of(tensors))
    return _with_tensors(value, lambda tensor: next(copies))


def _with_tensors(value: Any, replacement: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return replacement(value)
    if isinstance(value, Mapping):
        return {key: _with_tensors(item, replacement) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_with_tensors(item, replacement) for item in value])
    return value
