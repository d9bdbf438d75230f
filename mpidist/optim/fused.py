"""Checks and layouts for torch's fused CPU kernels.

A fused kernel processes as many elements of each tensor as the parameter has, from its first
element on in memory. The kernels check neither shapes nor strides of gradients and state, so the
caller must.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Tensor = torch.Tensor


def is_dense(parameter: Tensor) -> bool:
    """Return whether a tensor is non-overlapping and dense; True for devices other than the CPU."""
    return parameter.device.type != "cpu" or bool(
        torch.ops.aten.is_non_overlapping_and_dense(parameter)
    )


def require_dense(parameters: Iterable[Tensor]) -> None:
    """Check the parameters of a fused kernel.

    Raises:
        ValueError: A parameter is not non-overlapping and dense.
    """
    if not all(map(is_dense, parameters)):
        raise ValueError(
            "fused=True needs parameters whose elements fill their memory, each in a place of its "
            "own"
        )


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a value with a parameter's strides: a copy if only the strides differ."""
    if (
        value.layout is not torch.strided
        or value.stride() == parameter.stride()
        or value.shape != parameter.shape
    ):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def require_state(name: str, value: Tensor, parameter: Tensor, *, present: object = None) -> None:
    """Check a tensor of a state that a fused kernel may take.

    Args:
        name: The state's name; ``step`` has one element, others the parameter's shape.
        value: The tensor.
        parameter: The parameter.
        present: The optimizer's own value of that name, if any; its shape is valid as well.

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
