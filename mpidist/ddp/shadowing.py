"""A rank's own gradients while it mirrors the others' passes: put aside before the first, given back after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Tensor = torch.Tensor
# For each parameter its gradient, and a copy of the values if it is a view of a bucket, into which
# mirrored passes write.
Gradients = list[tuple[Tensor | None, Tensor | None]]

# Set on parameters meanwhile; ``mpidist.zero.join`` then takes their gradients for the others'
# average.
_IS_SHADOWING = "_mpidist_is_shadowing"


def set_aside(parameters: Sequence[Tensor], views: Mapping[int, Tensor]) -> Gradients:
    """Take the gradients away from their parameters.

    Args:
        views: By the parameter's place, its part of a bucket.
    """
    held: Gradients = []
    for place, parameter in enumerate(parameters):
        gradient, values = parameter.grad, None
        # By address: autograd may have replaced the view by another tensor on the same memory.
        if (
            gradient is not None
            and place in views
            and gradient.layout is torch.strided
            and gradient.numel()
        ):
            is_view = gradient.data_ptr() == views[place].data_ptr()
            values = gradient.detach().clone() if is_view else None
        held.append((gradient, values))
        parameter.grad = None
        setattr(parameter, _IS_SHADOWING, True)
    return held


def restore(held: Gradients, parameters: Sequence[Tensor], views: Mapping[int, Tensor]) -> None:
    """Give parameters the gradients that were ``set_aside``; what was a view is one of the present bucket."""
    for place, (parameter, (gradient, values)) in enumerate(zip(parameters, held, strict=True)):
        parameter.grad = gradient if values is None else views[place].copy_(values)
        delattr(parameter, _IS_SHADOWING)
