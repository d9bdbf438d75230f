"""State and settings from messages: checked and copied before an optimizer loads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mpidist.optim import fused

# Settings that choose kernels. Constructors check them together with the other arguments; later
# changes are not checked by torch.
SWITCHES = ("fused", "foreach", "capturable", "differentiable")

# Limit on a state's bytes beyond those of its message, in units of the parameters' bytes. No
# optimizer of torch has as many tensors for one parameter.
_MAX_COPIES = 16


def require_switches(settings: Mapping[str, object], present: Mapping[str, object]) -> None:
    """Refuse settings that enable kernels which the owner's group does not use.

    Args:
        settings: Received settings.
        present: The group's settings, or the optimizer's defaults for a new group.

    Raises:
        ValueError: A setting enables other kernels.
    """
    for name in SWITCHES:
        value, enabled = settings.get(name), present.get(name)
        if value is None or value is False:
            continue
        if type(value) not in (bool, int) or type(value) is not type(enabled) or value != enabled:
            raise ValueError(
                f"{name!r} is switched on where the optimizer is made, and by no message; it is "
                f"{enabled!r} here"
            )


def checked(
    state: Mapping[int, Mapping[str, object]],
    parameters: Sequence[torch.Tensor],
    is_fused: Sequence[bool],
    present: Mapping[int, Mapping[str, object]],
) -> dict[int, dict[str, object]]:
    """Return a copy of a state with memory of its own.

    Copies of a parameter's shape also have its strides. Only fused kernels need a check of shapes:
    other steps check them.

    Args:
        state: The state of each parameter, by number.
        parameters: By number.
        is_fused: For each parameter, whether its group has ``fused``.
        present: The optimizer's own state, by number.

    Raises:
        ValueError: A tensor of another shape than a fused kernel takes, or tensors that need much
            more memory than their message.
    """
    for number, values in state.items():
        if is_fused[number]:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    own = present.get(number, {}).get(name)
                    fused.require_state(name, value, parameters[number], present=own)
    _require_bounded(state, parameters)
    return {
        number: {name: _copied(value, parameters[number]) for name, value in values.items()}
        for number, values in state.items()
    }


def _require_bounded(
    state: Mapping[int, Mapping[str, object]], parameters: Sequence[torch.Tensor]
) -> None:
    """Refuse tensors with more elements than memory (strides of 0), which a copy would expand."""
    needed, allowance = 0, sum(_MAX_COPIES * _bytes(parameters[number]) for number in state)
    storages = {}
    for value in _tensors(state):
        if value.layout is torch.strided:
            needed += _bytes(value)
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    if needed > allowance + sum(storages.values()) + _MAX_COPIES * len(parameters):
        raise ValueError(
            f"the state's tensors share their memory: {needed} bytes would be needed for a copy"
        )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors(item)


def _copied(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout is not torch.strided:
            return value.clone()
        if value.shape != parameter.shape:
            return value.clone(memory_format=torch.contiguous_format)
        return torch.empty_like(
            parameter, dtype=value.dtype, device=value.device, requires_grad=False
        ).copy_(value)
    if type(value) is dict:
        return {name: _copied(item, parameter) for name, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_copied(item, parameter) for item in value)
    return value
