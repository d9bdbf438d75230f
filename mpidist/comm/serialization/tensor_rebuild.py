"""Rebuilding of tensors and arrays from a tensor table and the memory received with it.

For any bytes, no memory outside of what has arrived is read or written: each row is checked before
its memory is touched (``tensor_checks``). For a strict reader, tensors have no more elements than
have arrived, and values that torch and numpy take for granted are checked too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.serialization import tensor_checks as checks
from mpidist.comm.serialization.row_reader import BOOL, RowReader, flagged, shape_at
from mpidist.comm.serialization.tensor_format import (
    COUNTS,
    DENSE,
    DTYPES,
    FIRST,
    INLINE,
    ITEM_BYTES,
    PARAMETER,
    REQUIRES_GRAD,
    ROW,
    SHAPES,
    Buffer,
    Tabled,
)
from mpidist.errors import FrameError

Tensor = torch.Tensor
_frombuffer = torch.frombuffer
_DIMS_AT = COUNTS.size + 3  # of the first row's dimensions, from the start of the table
_MAX_LONE = 4096
# Key: the bytes in front of the elements. Value: dtype, size in bytes, shape if not flat. Never a
# bool, because its values must be checked.
_lone: dict[bytes, tuple[Any, int, tuple[int, ...] | None]] = {}


_MALFORMED = (
    *(struct.error, LookupError, TypeError, ValueError),
    *(RuntimeError, OverflowError, MemoryError),
)


def read_lone(table: Buffer, place: int) -> tuple[Tensor, int] | None:
    """Rebuild the tensor of a table that holds one small whole host tensor; return it and the end.

    None if the table is of another kind, is damaged, or has a shape and dtype new to ``read``.
    """
    dims = table[place + _DIMS_AT] if place + _DIMS_AT < len(table) else 0
    start = place + FIRST.size + 8 * dims
    found = _lone.get(bytes(table[place:start]))
    if found is None:
        return None
    dtype, nbytes, shape = found
    end = start + nbytes
    if end > len(table):
        return None
    raw = table[start:end]
    flat = _frombuffer(raw if type(raw) is bytearray else bytearray(raw), dtype=dtype)
    return (flat if shape is None else flat.resize_(shape)), end


def read(
    table: Buffer, place: int, parts: Sequence[Any], is_strict: bool = False
) -> tuple[list[Tabled], int, int]:
    """Rebuild the objects of a table; tensors and arrays own the memory of their parts.

    Args:
        table: A ``bytearray``, or a view of one.
        place: Offset of the table in it.
        parts: Memory in the order of ``tensor_table.describe``: buffers, or flat ``uint8`` tensors.
        is_strict: The sender is not trusted. Refuse tensors with more elements than have arrived
            (``describe`` writes none with ``is_dense``), and check bools and sparse indices, at a
            cost proportional to their size.

    Returns:
        The objects, the number of parts they use, and the end of the table.

    Raises:
        FrameError: The table does not fit what has arrived.
    """
    first = place
    try:
        count, used, number, form, flags, dims, _ = FIRST.unpack_from(table, place)
        if count == 1 and used == 0 and flags & INLINE and form == DENSE and dims < len(SHAPES):
            # The content of most messages with tensors.
            shape = SHAPES[dims].unpack_from(table, place + FIRST.size)
            place += FIRST.size + 8 * dims
            end = place + math.prod(shape, start=ITEM_BYTES[number])
            tensor = _inline(table[place:end], number, shape, end - place, is_strict)
            if flags & (REQUIRES_GRAD | PARAMETER):
                return [flagged(tensor, flags)], 0, end
            if end > place and number != BOOL:
                if len(_lone) >= _MAX_LONE:
                    _lone.clear()
                flat_shape = None if dims == 1 else shape
                _lone[bytes(table[first:place])] = DTYPES[number], end - place, flat_shape
            return [tensor], 0, end
        if used > len(parts):
            raise ValueError(f"{used} parts announced, {len(parts)} arrived")
        return _rows(table, place + COUNTS.size, count, parts[:used], is_strict)
    except _MALFORMED as error:
        raise FrameError(
            f"the table of {len(table) - first} bytes does not describe what came with it: {error}"
        ) from error


def _inline(
    raw: Buffer, number: int, shape: tuple[int, ...], nbytes: int, is_strict: bool
) -> Tensor:
    # A copy, because a small tensor must not keep its whole message alive.
    if not nbytes:
        checks.extent(shape, ITEM_BYTES[number])
        return torch.empty(shape, dtype=DTYPES[number], device="cpu")
    if len(raw) != nbytes:
        raise ValueError(f"a tensor of {nbytes} bytes is cut off")
    flat = _frombuffer(raw if type(raw) is bytearray else bytearray(raw), dtype=DTYPES[number])
    if is_strict and number == BOOL:
        checks.require_bools(flat)
    # In place: a view would keep its base alive, a second Python object for each tensor.
    return flat if len(shape) == 1 else flat.resize_(shape)


def _rows(
    table: Buffer, place: int, count: int, parts: Sequence[Any], is_strict: bool
) -> tuple[list[Tabled], int, int]:
    objects: list[Tabled] = []
    reader = None
    for _ in range(count):
        number, form, flags, dims, _ = ROW.unpack_from(table, place)
        if flags & INLINE and form == DENSE:
            shape = (
                SHAPES[dims].unpack_from(table, place + ROW.size)
                if dims < len(SHAPES)
                else shape_at(table, place, dims)
            )
            place += ROW.size + 8 * dims
            end = place + math.prod(shape, start=ITEM_BYTES[number])
            tensor = _inline(table[place:end], number, shape, end - place, is_strict)
            place = end
            objects.append(
                flagged(tensor, flags) if flags & (REQUIRES_GRAD | PARAMETER) else tensor
            )
            continue
        if reader is None:
            reader = RowReader(table, parts, is_strict)
        reader.place = place
        objects.append(reader.read())
        place = reader.place
    return objects, len(parts), place
