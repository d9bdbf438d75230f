"""Blockwise int8: 256 elements share an fp32 scale, their largest magnitude divided by 127.

``cuda/quantize.cu`` is the kernel; the torch twins in this file give the same bits.

Letters: N elements of a tensor; B = ``blocks_in(N)`` blocks of them, the last one may be shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from mpidist.kernels.launch import NAMES, has_kernels, launch

Tensor = torch.Tensor

BLOCK = 256  # elements that share a scale; as in cuda/quantize.cu
DTYPES = (torch.float32, torch.float64)

_CHUNK_NUMEL = 16 * BLOCK  # of a thread block; as in cuda/quantize.cu
_MIN_NORMAL = torch.finfo(torch.float32).tiny
# Elements that the twin processes at a time: 1 MiB of fp32 stays in the processor's cache; a GPU
# needs more.
_PIECE_NUMEL, _DEVICE_PIECE_NUMEL = 1 << 18, 1 << 24


def blocks_in(numel: int) -> int:
    """Return the number of blocks, and of scales, for ``numel`` elements."""
    return -(-numel // BLOCK)


def quantize(x: Tensor, q: Tensor, scales: Tensor) -> None:
    """Round ``x`` to integers of -127 … 127 times its blocks' scales.

    ``scale = absmax / 127`` in ``x``'s dtype, rounded to fp32; ``q = round(x · (1 / scale))``, ties
    to even. A scale not above the smallest normal fp32 number, as of a block of zeros, is replaced
    by that number for ``q`` and stored as 0. A block with an element that is not finite, or too
    large for an fp32 scale, gets scale NaN and zeros.

    Blocks: no; on CUDA the work is queued on the current stream.

    Args:
        x: Contiguous tensor of N elements; float32 or float64.
        q: Receives the integers: contiguous int8 tensor of N elements on the same device.
        scales: Receives the scales: contiguous float32 tensor of B elements on the same device.

    Raises:
        ValueError: Sizes or devices do not fit, or a tensor is not contiguous.
        TypeError: The dtypes have no kernel.
    """
    _require("quantize", (x,), q, scales)
    _quantize(x, None, q, scales)


def quantize_change(master: Tensor, flat: Tensor, q: Tensor, scales: Tensor) -> None:
    """Quantize ``master - flat`` without memory for the difference; see ``quantize``.

    Args:
        master: Contiguous tensor of N elements; float32 or float64.
        flat: The same.
        q: See ``quantize``.
        scales: See ``quantize``.
    """
    _require("quantize_change", (master, flat), q, scales)
    _quantize(master, flat, q, scales)


def dequantize_add(target: Tensor, q: Tensor, scales: Tensor) -> None:
    """Add ``q · scale`` to ``target`` in place.

    The product and the sum are rounded separately in ``target``'s dtype.

    Blocks: no; on CUDA the work is queued on the current stream.

    Args:
        target: Contiguous tensor of N elements; float32 or float64.
        q: Contiguous int8 tensor of N elements on the same device.
        scales: Contiguous float32 tensor of B elements on the same device.

    Raises:
        ValueError: Sizes or devices do not fit, or a tensor is not contiguous.
        TypeError: The dtypes have no kernel.
    """
    _require("dequantize_add", (target,), q, scales)
    if not target.numel():
        return
    if has_kernels(target):
        args = (target.data_ptr(), q.data_ptr(), scales.data_ptr(), np.int64(target.numel()))
        launch(
            "quantize.cu",
            f"dequantize_add_{NAMES[target.dtype]}",
            target.device,
            _chunks(target),
            args,
        )
    else:
        dequantize_add_twin(target, q, scales)


def quantize_twin(x: Tensor, base: Tensor | None, q: Tensor, scales: Tensor) -> None:
    """Compute ``quantize``, or ``quantize_change`` with a ``base``, with torch's operations."""
    x, q, scales = x.view(-1), q.view(-1), scales.view(-1)
    room = torch.empty(min(x.numel(), _piece_numel(x)), dtype=x.dtype, device=x.device)
    # A tensor, because on a GPU torch divides by a scalar as a product with its inverse.
    steps = torch.full((blocks_in(room.numel()),), 127, dtype=x.dtype, device=x.device)
    for start, stop, width in _pieces(x):
        change = room[: stop - start].view(-1, width)
        if base is None:
            own = x[start:stop].view(-1, width)
        else:
            own = torch.sub(
                x[start:stop].view(-1, width), base.view(-1)[start:stop].view(-1, width), out=change
            )
        # largest magnitude, without a temporary
        largest = torch.maximum(own.amax(1), own.amin(1).neg_())
        scale = scales[start // BLOCK : blocks_in(stop)]
        torch.div(largest, steps[: len(scale)], out=scale)
        inverse = scale.to(x.dtype).clamp_min(_MIN_NORMAL).reciprocal_()
        torch.mul(own, inverse.unsqueeze(1), out=change)
        q[start:stop].view(-1, width).copy_(change.round_())
    torch.threshold_(scales, _MIN_NORMAL, 0.0)
    is_lost = scales.isfinite().logical_not_()
    if bool(is_lost.any()):
        scales.masked_fill_(is_lost, math.nan)
        # The conversion of NaN to an integer depends on the machine.
        q.masked_fill_(is_lost.repeat_interleave(BLOCK)[: q.numel()], 0)


def dequantize_add_twin(target: Tensor, q: Tensor, scales: Tensor) -> None:
    """Compute ``dequantize_add`` with torch's operations."""
    target, q, scales = target.view(-1), q.view(-1), scales.view(-1)
    room = torch.empty(
        min(target.numel(), _piece_numel(target)), dtype=target.dtype, device=target.device
    )
    for start, stop, width in _pieces(target):
        change = room[: stop - start].copy_(q[start:stop])
        change.view(-1, width).mul_(
            scales[start // BLOCK : blocks_in(stop)].to(target.dtype).unsqueeze(1)
        )
        target[start:stop].add_(change)


def _quantize(x: Tensor, base: Tensor | None, q: Tensor, scales: Tensor) -> None:
    if not x.numel():
        return
    if has_kernels(x):
        addresses = (
            x.data_ptr(),
            0 if base is None else base.data_ptr(),
            q.data_ptr(),
            scales.data_ptr(),
        )
        launch(
            "quantize.cu",
            f"quantize_{NAMES[x.dtype]}",
            x.device,
            _chunks(x),
            (*addresses, np.int64(x.numel())),
        )
    else:
        quantize_twin(x, base, q, scales)


def _chunks(x: Tensor) -> int:
    return -(-x.numel() // _CHUNK_NUMEL)


def _piece_numel(x: Tensor) -> int:
    return _PIECE_NUMEL if x.is_cpu else _DEVICE_PIECE_NUMEL


def _pieces(x: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, width) of pieces whose blocks all have ``width`` elements."""
    numel, most = x.numel(), _piece_numel(x)
    whole = numel - numel % BLOCK
    for start in range(0, whole, most):
        yield start, min(start + most, whole), BLOCK
    if whole < numel:
        yield whole, numel, numel - whole


def _require(name: str, wide: tuple[Tensor, ...], q: Tensor, scales: Tensor) -> None:
    numel, dtype, device = wide[0].numel(), wide[0].dtype, wide[0].device
    if (
        dtype not in DTYPES
        or any(t.dtype != dtype for t in wide)
        or q.dtype != torch.int8
        or scales.dtype != torch.float32
    ):
        raise TypeError(
            f"{name} needs tensors of float32 or of float64, q of int8 and scales of float32; "
            f"got {', '.join(str(t.dtype) for t in (*wide, q, scales))}"
        )
    tensors = (*wide, q, scales)
    if any(t.numel() != numel for t in (*wide, q)) or scales.numel() != blocks_in(numel):
        raise ValueError(
            f"{name} needs {numel} elements, as many of q and {blocks_in(numel)} scales; got "
            f"{[t.numel() for t in tensors]}"
        )
    if any(t.device != device or not t.is_contiguous() for t in tensors):
        raise ValueError(
            f"{name} needs contiguous tensors on one device; got "
            f"{[(str(t.device), t.stride()) for t in tensors]}"
        )
    if any(t.is_neg() for t in tensors):
        raise ValueError(f"{name} reads memory as it lies: resolve_neg() comes first")
