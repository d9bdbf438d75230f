"""Checks of one row of a tensor table: its structure before its memory is touched, then its values.

The structure is always checked, at a cost independent of the data. A reader of untrusted data also
checks the values: torch and numpy take for granted that bools and sparse indices are in range, and
their behavior is undefined otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
_MAX_BYTES = 1 << 63


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


def _brief(numbers: Sequence[int]) -> str:
    """Return numbers for a message, at most eight."""
    return f"({', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''})"
