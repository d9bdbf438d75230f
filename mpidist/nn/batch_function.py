"""Autograd function of batch normalisation over the ranks of a group, and its statistics.

Letters: C channels; N values per channel in the batches of all ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from mpidist.comm.algorithms.reduce_op import SUM
from mpidist.comm.group_types import Group
from mpidist.nn import batch_kernels, batch_statistics
from mpidist.nn.batch_statistics import Statistics

Tensor = torch.Tensor


@torch.no_grad()
def gather_statistics(
    group: Group, input: Tensor | None, channels: int, needs_gradient: bool, refusal: str | None
) -> Statistics:
    """Return the statistics over the inputs of all ranks.

    Collective: over the group.

    Args:
        group: A native group.
        input: This rank's input, a dense tensor; None if the input was refused.
        channels: C.
        needs_gradient: The input needs a gradient.
        refusal: Reason for the refusal, or None.

    Raises:
        ValueError: On all ranks; see ``batch_statistics.merge``.
    """
    if input is None:
        row = batch_statistics.row_of(
            channels, batch_statistics.REFUSED, needs_gradient, None, None
        )
    elif not input.numel():
        row = batch_statistics.row_of(channels, 0, needs_gradient, None, None, input.device)
    else:
        row = batch_statistics.row_of(
            channels,
            input.numel() // channels,
            needs_gradient,
            *batch_kernels.statistics(input),
            input.device,
        )
    rows = row.new_empty(group.size, row.numel())
    group.all_gather_into_tensor(rows, row)
    return batch_statistics.merge(rows, refusal)


class NormalizeContext(Protocol):
    """torch's context of one forward pass and its backward pass.

    Attributes:
        saved_tensors: Input, weight (it may be None), mean, inverse deviation.
        needs_input_grad: For each argument of ``forward``, whether it needs a gradient.
        count: N.
        group: The group of the statistics.
        bias_dtype: None without a bias.
    """

    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    count: int
    group: Group
    bias_dtype: torch.dtype | None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for ``saved_tensors``."""


class Normalize(torch.autograd.Function):
    """Normalisation by the statistics of all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: NormalizeContext,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        group: Group,
    ) -> Tensor:
        """Normalise this rank's batch by the statistics of all batches."""
        dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
        mean, inverse = statistics.mean.to(dtype), (statistics.variance + eps).rsqrt().to(dtype)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.group = statistics.count, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return (
            batch_kernels.normalise(input, weight, bias, mean, inverse)
            if input.numel()
            else torch.empty_like(input)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: NormalizeContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of batch, weight and bias.

        Collective: over the group, if the input needs a gradient.
        """
        input, weight, mean, inverse = ctx.saved_tensors
        gradient = batch_kernels.dense(gradient)
        is_empty = not input.numel()
        sums = (
            mean.new_zeros(2, mean.numel())
            if is_empty
            else batch_kernels.sums(gradient, input, mean, inverse)
        )
        # A rank without a batch returns zeros, not None, because data-parallel modules wait for a
        # gradient of every parameter.
        by_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        by_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        by_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            total = sums.to(torch.float64, copy=True)
            ctx.group.all_reduce(total, SUM)
            if is_empty:
                by_input = torch.zeros_like(input)
            else:
                means = (total / ctx.count).to(mean.dtype)
                by_input = batch_kernels.input_gradient(
                    gradient, input, mean, inverse, weight, means
                )
        return by_input, by_weight, by_bias, None, None, None
