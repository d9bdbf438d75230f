"""Checks of one row of a tensor table: its structure before its memory is touched, then its values.

The structure is always checked, at a cost independent of the data. A reader of untrusted data also
checks the values: torch and numpy take for granted that bools, sparse indices and zero points are
in range, and their behavior is undefined otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
_MAX_BYTES = 1 << 63
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_ZERO_POINTS = {
    torch.int8: (-(1 << 7), (1 << 7) - 1),
    torch.uint8: (0, 255),
    torch.int32: (-(1 << 31), (1 << 31) - 1),
}


def extent(shape: Sequence[int], item_bytes: int) -> int:
    """Return the size in bytes of the elements of a shape.

    Raises:
        ValueError: A size below 0; sizes whose product, with 1 for 0, no tensor can have; a dtype
            without items.
    """
    if not item_bytes:
        raise ValueError("a dtype that this worker does not know")
    if not shape:
        return item_bytes
    if min(shape) < 0:
        raise ValueError(f"sizes {_brief(shape)}")
    nbytes = math.prod(shape, start=item_bytes)
    # Strides are products of the sizes, also where one size is 0.
    if (nbytes or math.prod([size or 1 for size in shape], start=item_bytes)) >= _MAX_BYTES:
        raise ValueError(f"sizes {_brief(shape)}: more elements than memory can hold")
    return nbytes


def require_within(
    shape: Sequence[int], strides: Sequence[int], offset: int, item_bytes: int, nbytes: int
) -> None:
    """Check that strided elements are within a part of ``nbytes``.

    Raises:
        ValueError: They are not, or an offset or a stride is negative.
    """
    reach = (
        0
        if 0 in shape
        else 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
    )
    if offset < 0 or min(strides, default=0) < 0 or (offset + reach) * item_bytes > nbytes:
        raise ValueError(
            f"sizes {_brief(shape)} with strides {_brief(strides)} from element {offset} on leave "
            f"{nbytes} bytes"
        )


def require_bools(data: Tensor) -> None:
    """Check the bytes of a bool tensor.

    Raises:
        ValueError: A byte is neither 0 nor 1.
    """
    if data.numel() and data.view(torch.uint8).amax().item() > 1:
        raise ValueError("a bool of neither 0 nor 1")


def require_coo_form(indices: Tensor, values: Tensor, shape: Sequence[int]) -> None:
    """Check that indices and values make a COO tensor; the values of the indices are not checked.

    Args:
        indices: Shape (sparse dimensions, elements), int64.

    Raises:
        ValueError: They do not.
    """
    extent(shape, 1)
    is_matrix = indices.dim() == 2 and indices.dtype is torch.int64
    sparse_dims = indices.shape[0] if is_matrix else 0
    if (
        not is_matrix
        or not values.dim()
        or values.shape[0] != indices.shape[1]
        or sparse_dims > len(shape)
        or tuple(values.shape[1:]) != tuple(shape[sparse_dims:])
    ):
        raise ValueError(
            f"indices {_brief(indices.shape)}, values {_brief(values.shape)} of a sparse tensor of "
            f"sizes {_brief(shape)}"
        )


def require_coalesced(indices: Tensor, shape: Sequence[int]) -> None:
    """Check that the indices of a COO tensor, all in range, ascend without repetition.

    torch checks this in some releases only.

    Raises:
        ValueError: They do not.
    """
    if indices.shape[1] < 2:
        return
    places = indices.new_zeros(indices.shape[1])
    for row, size in zip(indices, shape, strict=False):
        places = places * size + row
    if not bool((places[1:] > places[:-1]).all()):
        raise ValueError("a sparse tensor that claims to be coalesced, and is not")


def require_compressed_form(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: Sequence[int], layout: torch.layout
) -> None:
    """Check that indices and values make a compressed sparse tensor; index values are not checked.

    Raises:
        ValueError: They do not.
    """
    extent(shape, 1)
    batch = compressed.dim() - 1
    blocked = 2 * (layout in _BLOCKED)
    fits = (
        compressed.dtype is plain.dtype
        and plain.dtype in (torch.int32, torch.int64)
        and 0 <= batch <= len(shape) - 2
        and plain.dim() == batch + 1
        and values.dim() == len(shape) - 1 + blocked
        and compressed.shape[:batch]
        == plain.shape[:batch]
        == values.shape[:batch]
        == torch.Size(shape[:batch])
        and plain.shape[batch] == values.shape[batch]
        and tuple(values.shape[batch + 1 + blocked :]) == tuple(shape[batch + 2 :])
    )
    if fits:
        block = values.shape[batch + 1 : batch + 3] if blocked else (1, 1)
        rows, columns = shape[batch : batch + 2]
        fits = min(block) > 0 and rows % block[0] == 0 and columns % block[1] == 0
        lines = fits and (rows // block[0] if layout in _BY_ROW else columns // block[1])
        fits = fits and compressed.shape[batch] == lines + 1
    if not fits:
        found = ", ".join([_brief(one.shape) for one in (compressed, plain, values)])
        raise ValueError(f"indices and values {found} of a sparse tensor of sizes {_brief(shape)}")


def require_channels(integers: Tensor, scales: Tensor, zeros: Tensor, axis: int) -> None:
    """Check that a quantized tensor has a scale and a zero point for each position along an axis.

    Raises:
        ValueError: The shapes do not fit.
    """
    if (
        not 0 <= axis < integers.dim()
        or not scales.shape == zeros.shape == integers.shape[axis : axis + 1]
    ):
        raise ValueError(
            f"scales {_brief(scales.shape)} and zeros {_brief(zeros.shape)} along axis {axis} of "
            f"{_brief(integers.shape)}"
        )


def require_quantization(integers: torch.dtype, scales: Tensor, zeros: Tensor) -> None:
    """Check the scales and zero points of a quantized tensor.

    Args:
        integers: The dtype of its integers.

    Raises:
        ValueError: A scale is not finite, or a zero point is outside of the dtype's range.
        KeyError: No quantized tensor has this dtype.
    """
    lowest, highest = _ZERO_POINTS[integers]
    if not bool(torch.isfinite(scales).all()) or not bool(
        ((zeros >= lowest) & (zeros <= highest)).all()
    ):
        raise ValueError(
            f"a scale that is not finite, or a zero point outside of {lowest} to {highest}"
        )


def _brief(numbers: Sequence[int]) -> str:
    """Return numbers for a message, at most eight."""
    return f"({', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''})"
