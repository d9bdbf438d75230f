"""Gradients of a distributed autograd context, on the worker that owns the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.autograd import api as autograd
from mpidist.comm.memory import host_values

Tensor = torch.Tensor


def require_context(context_id: int) -> None:
    """Refuse an unknown context.

    Raises:
        TypeError: ``context_id`` is no int.
        RuntimeError: This worker has no such context.
    """
    if type(context_id) is not int:
        raise TypeError(
            f"context_id is the number that mpidist.autograd.context() returns; got {context_id!r}"
        )
    autograd._retrieve_context(context_id)


def of_context(context_id: int) -> dict[Tensor, Tensor]:
    """Return a context's gradients on this worker, by parameter.

    Raises:
        RuntimeError: No such context here.
    """
    return autograd.get_gradients(context_id)


def of_parameters(context_id: int, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return a context's gradient of each parameter; None if it has none.

    Raises:
        RuntimeError: No such context here.
    """
    found = of_context(context_id)
    return [found.get(parameter) for parameter in parameters]


@torch.no_grad()
def norms(gradients: Sequence[Tensor | None], norm_type: float) -> Tensor:
    """Return the norm of each gradient that is not None, in one tensor on the CPU.

    Rows that occur twice in a sparse gradient are summed first.

    Blocks: until the gradients are computed, once for each device.
    """
    present = [_values(gradient) for gradient in gradients if gradient is not None]
    if not present:
        return torch.zeros(0)
    dtype = present[0].dtype
    for gradient in present:
        dtype = torch.promote_types(dtype, gradient.dtype)
    found = [norm.to(dtype.to_real()) for norm in torch._foreach_norm(present, norm_type)]
    return torch.stack(host_values.copies_of(found))


def total_norm(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients from the norms of each; 0 if there are none.

    Source: ``torch.nn.utils.get_total_norm``.
    """
    present = [each for each in norms if each.numel()]
    return torch.linalg.vector_norm(torch.cat(present), norm_type) if present else torch.tensor(0.0)


@torch.no_grad()
def scale(gradients: Sequence[Tensor | None], factor: float) -> None:
    """Multiply gradients in place."""
    dense = [
        gradient
        for gradient in gradients
        if gradient is not None and gradient.layout is torch.strided
    ]
    if dense:
        torch._foreach_mul_(dense, factor)
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            gradient.mul_(factor)


def _values(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()
