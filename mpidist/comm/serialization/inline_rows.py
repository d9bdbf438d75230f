"""Inline rows: tables of small whole host tensors, with the elements in the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.memory.buffer import memory as _memory
from mpidist.comm.serialization.tensor_format import (
    COUNTS,
    DENSE,
    DTYPE_NUMBERS,
    INLINE,
    PARAMETER,
    REQUIRES_GRAD,
    WHOLE,
    row,
)
from mpidist.comm.serialization.tensor_spans import overlap

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_STRIDED = torch.strided
# Largest size of a tensor in a row: a table of one such row still fits in an eager message.
INLINE_BYTES = 30 << 10
_MAX_HEADS = 4096  # entries at which the cache is cleared
COUNTS_OF_ONE = COUNTS.pack(1, 0)  # precedes the row in a table of one inline row
# Key: dtype, shape, class and requires_grad. Value: the row without its elements, or None if the
# elements cannot be in the row; and their size in bytes, negative for complex dtypes.
_heads: dict[Any, tuple[bytes | None, int]] = {}


def inline_row(obj: Any) -> tuple[Any, ...] | None:
    """Return the row of one small whole host tensor, as bytes and buffers to be joined at once.

    The buffers are the tensor's own memory. None for any other object.
    """
    kind = type(obj)
    if (
        (kind is not Tensor and kind is not Parameter)
        or not obj.is_cpu
        or obj.layout is not _STRIDED
    ):
        return None
    key = obj.dtype, obj.shape, kind, obj.requires_grad
    head, nbytes = _heads.get(key) or _head_of(*key)
    if (
        head is None
        or not obj.is_contiguous()
        or obj.is_neg()
        or obj.__dict__
        or (nbytes < 0 and obj.is_conj())
    ):
        return None
    # numpy() would export the memory, and a tensor whose memory is exported cannot be resized.
    return (head, _memory(obj.data_ptr(), abs(nbytes))) if nbytes else (head,)


def inline_table(objects: Sequence[Any]) -> Sequence[Any] | None:
    """Return the table of small whole host tensors that share no memory, as ``inline_row`` does.

    None if any object is of another kind.
    """
    pieces = [COUNTS_OF_ONE if len(objects) == 1 else COUNTS.pack(len(objects), 0)]
    for obj in objects:
        row = inline_row(obj)
        if row is None:
            return None
        pieces += row
    return None if len(objects) > 1 and overlap(objects) else pieces


def _head_of(
    dtype: torch.dtype, shape: torch.Size, kind: type, requires_grad: bool
) -> tuple[bytes | None, int]:
    number = DTYPE_NUMBERS.get(dtype)
    nbytes = shape.numel() * dtype.itemsize
    head = None
    if number is not None and nbytes <= INLINE_BYTES and len(shape) < 256:
        flags = INLINE | WHOLE | REQUIRES_GRAD * requires_grad | PARAMETER * (kind is not Tensor)
        head = row(number, DENSE, flags, 0, shape)
    if len(_heads) >= _MAX_HEADS:
        _heads.clear()
    found = _heads[dtype, shape, kind, requires_grad] = (
        head,
        -nbytes if dtype.is_complex else nbytes,
    )
    return found
