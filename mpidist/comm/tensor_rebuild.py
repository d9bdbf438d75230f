"""Rebuilds tensors and arrays of a tensor table from the memory that came with it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpidist.comm.tensor_format import (
    ARRAY_DTYPES,
    BYTEARRAY,
    COALESCED,
    COO,
    COUNTS,
    DENSE,
    DTYPES,
    FIRST,
    INLINE,
    ITEM_BYTES,
    LAYOUTS,
    OFFSET,
    PARAMETER,
    PER_CHANNEL,
    PER_TENSOR,
    REQUIRES_GRAD,
    ROW,
    SCALE,
    SHAPES,
    WHOLE,
)
from mpidist.errors import FrameError

Tensor = torch.Tensor
_frombuffer = torch.frombuffer
_DIMS_AT = COUNTS.size + 3  # of the first row's dimensions, from the start of a table
_MOST_LONE = 4096
_lone: dict[
    bytes, tuple[Any, int, tuple[int, ...] | None]
] = {}  # what stands before the elements: dtype, bytes, shape if not flat


def read_lone(table: Any, place: int) -> tuple[Tensor, int] | None:
    """Rebuild the tensor of a table that holds one small whole host tensor; return it and where the table ends.

    None: the table is another, is damaged, or begins with what ``read`` has not met yet.
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
    return (flat if shape is None else flat.view(shape)), end


def read(table: Any, place: int, parts: Sequence[Any]) -> tuple[list[Any], int, int]:
    """Rebuild the objects of a table; tensors and arrays own the memory of their parts.

    Args:
        table: A ``bytearray``, or a view of one.
        place: Where the table begins in it.
        parts: Memory in the order of ``described``: buffers, or flat ``uint8`` tensors.

    Returns:
        The objects, how many parts are theirs, and where the table ends.

    Raises:
        FrameError: The table does not fit what has arrived.
    """
    try:
        count, used, number, form, flags, dims, _ = FIRST.unpack_from(table, place)
        if count == 1 and used == 0 and flags & INLINE and form == DENSE and dims < len(SHAPES):
            # What most messages with tensors hold.
            first = place
            place += FIRST.size
            shape = SHAPES[dims].unpack_from(table, place)
            place += 8 * dims
            end = place + (shape[0] * ITEM_BYTES[number] if dims == 1 else math.prod(shape, start=ITEM_BYTES[number]))
            tensor = _inline(table[place:end], DTYPES[number], shape, end - place)
            if flags & (REQUIRES_GRAD | PARAMETER):
                return [_flagged(tensor, flags)], 0, end
            if end > place and end <= len(table):
                if len(_lone) >= _MOST_LONE:
                    _lone.clear()
                _lone[bytes(table[first:place])] = DTYPES[number], end - place, None if dims == 1 else shape
            return [tensor], 0, end
        if used > len(parts):
            raise ValueError(f"{used} parts announced, {len(parts)} arrived")
        place += COUNTS.size
        objects: list[Any] = []
        reader = None
        for _ in range(count):
            number, form, flags, dims, _ = ROW.unpack_from(table, place)
            if flags & INLINE and form == DENSE:
                shape = SHAPES[dims].unpack_from(table, place + ROW.size) if dims < len(SHAPES) else _shape(table, place, dims)
                place += ROW.size + 8 * dims
                end = place + math.prod(shape, start=ITEM_BYTES[number])
                tensor = _inline(table[place:end], DTYPES[number], shape, end - place)
                place = end
                objects.append(_flagged(tensor, flags) if flags & (REQUIRES_GRAD | PARAMETER) else tensor)
                continue
            if reader is None:
                reader = _Reader(table, parts)
            reader.place = place
            objects.append(reader.read())
            place = reader.place
        return objects, used, place
    except (struct.error, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FrameError(f"the table of {len(table) - place} bytes does not describe what came with it: {error}") from error


def _shape(table: Any, place: int, dims: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{dims}q", table, place + ROW.size)


def _inline(raw: Any, dtype: Any, shape: tuple[int, ...], nbytes: int) -> Tensor:
    # In memory of its own: a small tensor must not keep its whole message.
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if len(raw) != nbytes:
        raise ValueError(f"a tensor of {nbytes} bytes is cut off")
    flat = _frombuffer(raw if type(raw) is bytearray else bytearray(raw), dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _flagged(tensor: Tensor, flags: int) -> Tensor:
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_()


class _Reader:
    """The rows that are not inline, one after the other."""

    def __init__(self, table: Any, parts: Sequence[Any]) -> None:
        self.place = 0
        self._table = table
        self._parts = parts
        self._storages: dict[int, torch.UntypedStorage] = {}

    def read(self) -> Any:
        """Return the next row's object."""
        table, place = self._table, self.place
        number, form, flags, dims, part = ROW.unpack_from(table, place)
        shape = _shape(table, place, dims)
        self.place = place + ROW.size + 8 * dims
        if form == DENSE:
            tensor = self._dense(number, flags, part, shape)
        elif form <= BYTEARRAY:
            return self._array(number, form, part, shape)
        else:
            tensor = self._composite(form, flags, shape)
        return _flagged(tensor, flags) if flags & (REQUIRES_GRAD | PARAMETER) else tensor

    def _dense(self, number: int, flags: int, part: int, shape: tuple[int, ...]) -> Tensor:
        memory = self._parts[part]
        dtype: Any = DTYPES[number]
        if flags & WHOLE:
            if isinstance(memory, Tensor):
                return memory.view(dtype).view(shape)
            if memory.nbytes == 0:
                return torch.empty(_empty(shape), dtype=dtype, device="cpu")
            flat = torch.frombuffer(memory, dtype=dtype)
            return flat if shape == flat.shape else flat.view(shape)
        (offset,) = OFFSET.unpack_from(self._table, self.place)
        strides = struct.unpack_from(f"<{len(shape)}q", self._table, self.place + 8)
        self.place += 8 + 8 * len(shape)
        storage = self._storages.get(part)
        if storage is None:
            if isinstance(memory, Tensor):
                storage = memory.untyped_storage()
            elif memory.nbytes == 0:
                return torch.empty_strided(_empty(shape), strides, dtype=dtype, device="cpu")
            else:
                storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            self._storages[part] = storage
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)

    def _array(self, number: int, form: int, part: int, shape: tuple[int, ...]) -> Any:
        memory = self._parts[part]
        if form == BYTEARRAY:
            return bytearray(memory)
        dtype = ARRAY_DTYPES[number]
        if memory.nbytes == 0:
            return np.empty(_empty(shape), dtype)
        return np.frombuffer(memory, dtype).reshape(shape)

    def _composite(self, form: int, flags: int, shape: tuple[int, ...]) -> Tensor:
        if form == PER_TENSOR:
            scale, zero = SCALE.unpack_from(self._table, self.place)
            self.place += SCALE.size
            return torch._make_per_tensor_quantized_tensor(self.read(), scale, zero)
        if form == PER_CHANNEL:
            (axis,) = OFFSET.unpack_from(self._table, self.place)
            self.place += OFFSET.size
            return torch._make_per_channel_quantized_tensor(self.read(), self.read(), self.read(), axis)
        if form == COO:
            is_coalesced = bool(flags & COALESCED)
            indices, values = self.read(), self.read()
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=is_coalesced)
        parts = self.read(), self.read(), self.read()
        return torch.sparse_compressed_tensor(*parts, shape, layout=LAYOUTS[form], check_invariants=False)


def _empty(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what has no elements, and so no memory."""
    if 0 not in shape:
        raise ValueError(f"no memory for the elements of {shape}")
    return shape
