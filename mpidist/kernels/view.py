"""Flat views of contiguous tensors, and shaped views of flat memory.

torch calls a tensor of one element contiguous for any stride (``x[::4]`` of 4 elements), and
``view(-1)`` keeps that stride, with which ``view(dtype)`` refuses another element size. The stride
is therefore set here and not copied.
"""

from __future__ import annotations

import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the N elements of a contiguous tensor as a view of shape (N,) and stride 1."""
    return tensor.as_strided((tensor.numel(),), (1,))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a uint8 tensor of shape (nbytes,)."""
    return flat_view(tensor).view(torch.uint8)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, each once and without gaps, in some dimension order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def laid_out(part: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """View flat memory in the shape of ``form`` and, if ``form`` is dense, in its strides."""
    if is_dense(form):
        return part.as_strided(form.shape, form.stride(), part.storage_offset())
    return part.view(form.shape)
