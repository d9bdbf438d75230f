"""Memory that torch's fused kernels go through: a CPU tensor's from its first element on, as many as the parameter has.

The kernels check neither shapes nor strides of gradients and state, so whoever calls them does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Tensor = torch.Tensor


def is_dense(parameter: Tensor) -> bool:
    """Say whether a CPU tensor's elements fill its memory, each in a place of its own; True elsewhere."""
    return parameter.device.type != "cpu" or bool(
        torch.ops.aten.is_non_overlapping_and_dense(parameter)
    )


def require_dense(group: Mapping[str, Any]) -> None:
    """Check the parameters of a group whose steps the fused kernel takes.

    Raises:
        ValueError: One's elements do not fill its memory.
    """
    if not all(map(is_dense, group["params"])):
        raise ValueError(
            "fused=True needs parameters whose elements fill their memory, each in a place of its "
            "own"
        )


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a value with a parameter's strides; itself if it has them, is not strided or of another shape."""
    if (
        value.layout is not torch.strided
        or value.stride() == parameter.stride()
        or value.shape != parameter.shape
    ):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def require_state(name: str, value: Tensor, parameter: Tensor, *, present: Any = None) -> None:
    """Check a tensor of a state that a fused kernel may take.

    Args:
        name: Its name; ``step`` has one element.
        value: The tensor.
        parameter: All others have this parameter's shape.
        present: What the optimizer has under that name; as its own code made it, its shape is
            right, too.

    Raises:
        ValueError: Another shape, or a layout that is not strided.
    """
    is_right = value.numel() == 1 if name == "step" else value.shape == parameter.shape
    if not is_right and isinstance(present, Tensor):
        is_right = value.shape == present.shape
    if not is_right:
        raise ValueError(
            f"the state has {name!r} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}"
        )
    if value.layout is not torch.strided:
        raise ValueError(
            f"the state has {name!r} of layout {value.layout}, and fused kernels take strided "
            "tensors"
        )
