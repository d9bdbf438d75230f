"""Flat views of contiguous tensors.

torch calls a tensor of one element contiguous whatever its strides are (``x[::4]`` of 4 elements), and ``view(-1)`` keeps such a
stride, with which ``view(dtype)`` refuses another element size. So the stride is set here, not taken over.
"""

from __future__ import annotations

import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the N elements of a contiguous tensor as a tensor of shape (N,) and stride 1, over the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a uint8 tensor of shape (nbytes,)."""
    return flat_view(tensor).view(torch.uint8)
