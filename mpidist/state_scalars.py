"""Scalars of an optimizer's state that keep their bits when the state is loaded.

``Optimizer.load_state_dict`` of torch converts each tensor of a floating-point parameter's state to
the parameter's dtype, all but ``step``. ``mu_product`` of NAdam, ``eta`` and ``mu`` of ASGD are of
float32 for any parameter: of a bfloat16 parameter they would lose 16 bits, and a resumed run would
differ from an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpidist import state_names

# Kept by torch, but for fused kernels, which need it as torch converts it.
_KEPT = "step"
# Scalars also of a parameter without dimensions, whose other state is of its shape and dtype.
_SCALARS = frozenset({"mu_product", "eta", "mu"})


def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load the state of a ``torch.optim.Optimizer`` with the bits that were saved.

    Raises:
        ValueError: A group lacks a setting that the optimizer needs, or the state of a parameter a
            name.
    """
    state_names.require_complete(
        type(optimizer), optimizer.defaults, state_dict["param_groups"], state_dict["state"]
    )
    try:
        optimizer.load_state_dict(state_dict)
    except KeyError as error:
        # Of a class that is not known here.
        raise ValueError(
            f"{type(optimizer).__name__} cannot load the state dict, which has no {error} where it "
            "looks for it"
        ) from error
    restore(optimizer, state_dict)


def restore(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Give the scalars of a state that was just loaded the dtypes and values that were saved.

    Args:
        optimizer: A ``torch.optim.Optimizer``.
        state_dict: What it has loaded, in torch's format. Its tensors are copied.
    """
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    places = [
        (parameter, number)
        for own, saved in groups
        for parameter, number in zip(own["params"], saved["params"], strict=True)
    ]
    for parameter, number in places:
        held = optimizer.state.get(parameter)
        for name, value in (state_dict["state"].get(number) or {}).items():
            if held and _is_scalar(name, value, parameter):
                loaded = held.get(name)
                if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    held[name] = value.detach().to(loaded.device, copy=True)


def _is_scalar(name: object, value: object, parameter: torch.Tensor) -> bool:
    return (
        name != _KEPT
        and isinstance(value, torch.Tensor)
        and value.dim() == 0
        and (parameter.dim() > 0 or name in _SCALARS)
    )
