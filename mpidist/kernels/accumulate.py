"""Accumulation ``y += a * x`` in fp32: the step of a reduction of narrow or different dtypes.

``cuda/accumulate.cu`` is the kernel; the torch twin in this file gives the same numbers.
"""

from __future__ import annotations

import numpy as np
import torch

from mpidist.kernels.launch import NAMES, chunk_numel, compute_dtype, has_kernels, launch, scalar


def accumulate(y: torch.Tensor, x: torch.Tensor, a: float = 1.0) -> torch.Tensor:
    """Add ``a * x`` to ``y`` in place.

    The product and the sum are computed in fp32 (fp64 for fp64) and rounded once to ``y``'s dtype.

    Blocks: no; on CUDA the work is queued on the current stream.

    Args:
        y: Contiguous tensor of N elements; float16, bfloat16, float32 or float64.
        x: Contiguous tensor of N elements on the same device; of one of these dtypes, float64 if
            and only if ``y`` is.
        a: Factor.

    Returns:
        ``y``.

    Raises:
        ValueError: Sizes or devices differ, or a tensor is not contiguous.
        TypeError: The dtypes have no kernel.
    """
    if (
        y.numel() != x.numel()
        or y.device != x.device
        or not (y.is_contiguous() and x.is_contiguous())
    ):
        raise ValueError(
            f"accumulate needs contiguous tensors of one size and device; got {tuple(y.shape)} on "
            f"{y.device} and {tuple(x.shape)} on {x.device}"
        )
    if y.is_neg() or x.is_neg():
        raise ValueError("accumulate adds memory as it lies: resolve_neg() comes first")
    if (
        y.dtype not in NAMES
        or x.dtype not in NAMES
        or compute_dtype(y.dtype) != compute_dtype(x.dtype)
    ):
        raise TypeError(
            f"accumulate needs tensors of {sorted(map(str, NAMES))}, float64 alone; got {y.dtype} "
            f"and {x.dtype}"
        )
    if y.numel() and has_kernels(y):
        blocks = -(-y.numel() // chunk_numel(y.dtype, x.dtype))
        args = (y.data_ptr(), x.data_ptr(), np.int64(y.numel()), scalar(a, y.dtype))
        launch(
            "accumulate.cu", f"accumulate_{NAMES[y.dtype]}_{NAMES[x.dtype]}", y.device, blocks, args
        )
        return y
    return twin(y, x, a)


def twin(y: torch.Tensor, x: torch.Tensor, a: float = 1.0) -> torch.Tensor:
    """Compute the same with torch's operations."""
    wide = compute_dtype(y.dtype)
    term = x.to(wide).view(y.shape)
    if a != 1:
        term = term * a
    if y.dtype is wide:
        return y.add_(term)
    return y.copy_(y.to(wide).add_(term))
