"""Rebuilds tensors and arrays of a tensor table from the memory that came with it.

Whatever the bytes are, memory outside of what has arrived is neither read nor written: each row is
checked before its memory is touched (``tensor_checks``). For a strict reader tensors have no more
elements than have arrived, and the values that torch and numpy take for granted are checked as
well.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpidist.comm.serialization import tensor_checks as checks
from mpidist.comm.serialization.tensor_format import (
    ARRAY_DTYPES,
    BYTEARRAY,
    COALESCED,
    COO,
    COUNTS,
    DENSE,
    DTYPE_NUMBERS,
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
_BOOL = DTYPE_NUMBERS[torch.bool]
_DIMS_AT = COUNTS.size + 3  # of the first row's dimensions, from the start of a table
_MOST_LONE = 4096
# Whose a part is: one row's, or that of views. What one of them writes must not be another one's
# bools, which were checked.
_ONE, _VIEWS, _BOOLS = range(3)
# What stands before the elements: dtype, bytes, shape if not flat. Never a bool: its bytes must be
# looked at.
_lone: dict[bytes, tuple[Any, int, tuple[int, ...] | None]] = {}


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


def read(
    table: Any, place: int, parts: Sequence[Any], is_strict: bool = False
) -> tuple[list[Any], int, int]:
    """Rebuild the objects of a table; tensors and arrays own the memory of their parts.

    Args:
        table: A ``bytearray``, or a view of one.
        place: Where the table begins in it.
        parts: Memory in the order of ``described``: buffers, or flat ``uint8`` tensors.
        is_strict: Anybody may have written it. Tensors of more elements than have arrived are
            refused (``described`` writes none with ``is_dense``), and values that torch and numpy
            take for granted: bools, sparse indices, scales and zero points. Costs time in
            proportion to bools, sparse and quantized tensors.

    Returns:
        The objects, how many parts are theirs, and where the table ends.

    Raises:
        FrameError: The table does not fit what has arrived.
    """
    first = place
    try:
        count, used, number, form, flags, dims, _ = FIRST.unpack_from(table, place)
        if count == 1 and used == 0 and flags & INLINE and form == DENSE and dims < len(SHAPES):
            # What most messages with tensors hold.
            place += FIRST.size
            shape = SHAPES[dims].unpack_from(table, place)
            place += 8 * dims
            end = place + (
                shape[0] * ITEM_BYTES[number]
                if dims == 1
                else math.prod(shape, start=ITEM_BYTES[number])
            )
            tensor = _inline(table[place:end], number, shape, end - place, is_strict)
            if flags & (REQUIRES_GRAD | PARAMETER):
                return [_flagged(tensor, flags)], 0, end
            if end > place and number != _BOOL:
                if len(_lone) >= _MOST_LONE:
                    _lone.clear()
                _lone[bytes(table[first:place])] = (
                    DTYPES[number],
                    end - place,
                    None if dims == 1 else shape,
                )
            return [tensor], 0, end
        if used > len(parts):
            raise ValueError(f"{used} parts announced, {len(parts)} arrived")
        place += COUNTS.size
        objects: list[Any] = []
        reader = None
        for _ in range(count):
            number, form, flags, dims, _ = ROW.unpack_from(table, place)
            if flags & INLINE and form == DENSE:
                shape = (
                    SHAPES[dims].unpack_from(table, place + ROW.size)
                    if dims < len(SHAPES)
                    else _shape(table, place, dims)
                )
                place += ROW.size + 8 * dims
                end = place + math.prod(shape, start=ITEM_BYTES[number])
                tensor = _inline(table[place:end], number, shape, end - place, is_strict)
                place = end
                objects.append(
                    _flagged(tensor, flags) if flags & (REQUIRES_GRAD | PARAMETER) else tensor
                )
                continue
            if reader is None:
                reader = _Reader(table, parts[:used], is_strict)
            reader.place = place
            objects.append(reader.read())
            place = reader.place
        return objects, used, place
    except (
        struct.error,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise FrameError(
            f"the table of {len(table) - first} bytes does not describe what came with it: {error}"
        ) from error


def _shape(table: Any, place: int, dims: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{dims}q", table, place + ROW.size)


def _inline(raw: Any, number: int, shape: tuple[int, ...], nbytes: int, is_strict: bool) -> Tensor:
    # In memory of its own: a small tensor must not keep its whole message.
    if not nbytes:
        checks.extent(shape, ITEM_BYTES[number])
        return torch.empty(shape, dtype=DTYPES[number], device="cpu")
    if len(raw) != nbytes:
        raise ValueError(f"a tensor of {nbytes} bytes is cut off")
    flat = _frombuffer(raw if type(raw) is bytearray else bytearray(raw), dtype=DTYPES[number])
    if is_strict and number == _BOOL:
        checks.require_bools(flat)
    return flat if len(shape) == 1 else flat.view(shape)


def _flagged(tensor: Tensor, flags: int) -> Tensor:
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_()


class _Reader:
    """The rows that are not inline, one after the other."""

    def __init__(self, table: Any, parts: Sequence[Any], is_strict: bool) -> None:
        self.place = 0
        self._table = table
        self._parts = parts
        self._is_strict = is_strict
        self._kinds: dict[int, int] = {}  # of the parts met so far: whose they are
        self._storages: dict[int, torch.UntypedStorage] = {}
        # of parts that views share: how many bytes may still be checked view by view
        self._bools_left: dict[int, int] = {}

    def read(self) -> Any:
        """Return the next row's object."""
        number, form, flags, part, shape = self._row()
        if form == DENSE:
            tensor = self._dense(number, flags, part, shape)
        elif form <= BYTEARRAY:
            return self._array(number, form, part, shape)
        else:
            tensor = self._composite(number, form, flags, shape)
        return _flagged(tensor, flags) if flags & (REQUIRES_GRAD | PARAMETER) else tensor

    def _row(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        number, form, flags, dims, part = ROW.unpack_from(self._table, self.place)
        shape = _shape(self._table, self.place, dims)
        self.place += ROW.size + 8 * dims
        return number, form, flags, part, shape

    def _memory(self, part: int, kind: int) -> Any:
        """Return a part, for one row alone or for rows of a kind that may share it."""
        if part in self._kinds and (kind == _ONE or self._kinds[part] != kind):
            raise ValueError(f"part {part} is another row's as well")
        self._kinds[part] = kind
        return self._parts[part]

    def _dense(self, number: int, flags: int, part: int, shape: tuple[int, ...]) -> Tensor:
        dtype = DTYPES[number]
        nbytes = checks.extent(shape, ITEM_BYTES[number])
        if not flags & WHOLE:
            return self._strided(number, part, shape, nbytes)
        memory = self._memory(part, _ONE)
        if memory.nbytes != nbytes:
            raise ValueError(f"a part of {memory.nbytes} bytes for {nbytes}")
        if isinstance(memory, Tensor):
            tensor = memory.view(dtype).view(shape)
        elif not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        else:
            tensor = torch.frombuffer(memory, dtype=dtype)
            tensor = tensor if len(shape) == 1 else tensor.view(shape)
        if self._is_strict and number == _BOOL:
            checks.require_bools(tensor)
        return tensor

    def _strided(self, number: int, part: int, shape: tuple[int, ...], nbytes: int) -> Tensor:
        (offset,) = OFFSET.unpack_from(self._table, self.place)
        strides = struct.unpack_from(f"<{len(shape)}q", self._table, self.place + 8)
        self.place += 8 + 8 * len(shape)
        memory = self._memory(part, _BOOLS if self._is_strict and number == _BOOL else _VIEWS)
        checks.require_within(shape, strides, offset, ITEM_BYTES[number], memory.nbytes)
        if self._is_strict and nbytes > memory.nbytes:
            raise ValueError(f"{nbytes} bytes of elements in a part of {memory.nbytes}")
        dtype = DTYPES[number]
        storage = self._storages.get(part)
        if storage is None:
            if isinstance(memory, Tensor):
                storage = memory.untyped_storage()
            elif memory.nbytes == 0:
                return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            else:
                storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            self._storages[part] = storage
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(
            storage, offset, shape, strides
        )
        if self._is_strict and number == _BOOL:
            self._require_bools(tensor, part, storage)
        return tensor

    def _require_bools(self, view: Tensor, part: int, storage: torch.UntypedStorage) -> None:
        # Any number of views may have all of the part. Those that do not overlap have no more
        # elements than it has bytes, and are checked one by one, as between them may lie what is no
        # bool; once there are more elements, the whole part is, once.
        left = self._bools_left.get(part, storage.nbytes())
        if left < 0:
            return
        self._bools_left[part] = left - view.numel()
        if view.numel() > left:
            self._bools_left[part] = -1
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        checks.require_bools(view)

    def _array(self, number: int, form: int, part: int, shape: tuple[int, ...]) -> Any:
        memory = self._memory(part, _ONE)
        if isinstance(memory, Tensor):
            raise ValueError("an array on a device")
        if form == BYTEARRAY:
            if shape:
                raise ValueError("a bytearray with sizes")
            return bytearray(memory)
        dtype = ARRAY_DTYPES[number]
        nbytes = checks.extent(shape, 0 if dtype is None else dtype.itemsize)
        if memory.nbytes != nbytes:
            raise ValueError(f"a part of {memory.nbytes} bytes for {nbytes}")
        if not nbytes:
            return np.empty(shape, dtype)
        if self._is_strict and number == _BOOL:
            checks.require_bools(torch.frombuffer(memory, dtype=torch.uint8))
        return np.frombuffer(memory, dtype).reshape(shape)

    def _composite(self, number: int, form: int, flags: int, shape: tuple[int, ...]) -> Tensor:
        if form in (PER_TENSOR, PER_CHANNEL):
            return self._quantized(form == PER_CHANNEL, shape)
        if form == COO:
            indices, values = self._inner(), self._inner()
            checks.require_coo_form(indices, values, shape)
        else:
            layout = LAYOUTS[form]
            inner = compressed, plain, values = self._inner(), self._inner(), self._inner()
            checks.require_compressed_form(compressed, plain, values, shape, layout)
        if values.dtype is not DTYPES[number]:
            raise ValueError(f"values of {values.dtype} for a sparse tensor of {DTYPES[number]}")
        if form != COO:
            return torch.sparse_compressed_tensor(
                *inner, shape, layout=layout, check_invariants=self._is_strict
            )
        made = torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=self._is_strict, is_coalesced=False
        )
        if flags & COALESCED and self._is_strict:
            checks.require_coalesced(indices, shape)
        return made._coalesced_(bool(flags & COALESCED))

    def _quantized(self, is_by_channel: bool, shape: tuple[int, ...]) -> Tensor:
        if is_by_channel:
            (axis,) = OFFSET.unpack_from(self._table, self.place)
            self.place += OFFSET.size
            integers, scales, zeros = self._inner(), self._inner(), self._inner()
            checks.require_channels(integers, scales, zeros, axis)
        else:
            scale, zero = SCALE.unpack_from(self._table, self.place)
            self.place += SCALE.size
            integers, scales, zeros = (
                self._inner(),
                torch.tensor(scale, dtype=torch.float64),
                torch.tensor(zero),
            )
        if integers.shape != shape:
            raise ValueError(
                f"integers of sizes {tuple(integers.shape)} for a quantized tensor of {shape}"
            )
        if self._is_strict:
            checks.require_quantization(integers.dtype, scales, zeros)
        if is_by_channel:
            return torch._make_per_channel_quantized_tensor(integers, scales, zeros, axis)
        return torch._make_per_tensor_quantized_tensor(integers, scale, zero)

    def _inner(self) -> Tensor:
        """Return the dense tensor of the next row, which is a sparse or quantized tensor's."""
        number, form, flags, part, shape = self._row()
        # What other rows share, whoever gets them could change behind the checks.
        if form != DENSE or flags & INLINE or (self._is_strict and not flags & WHOLE):
            raise ValueError(f"form {form} with flags {flags} within a sparse or quantized tensor")
        return self._dense(number, flags, part, shape)
