"""Rows of a tensor table whose elements are elsewhere: dense, strided, sparse, arrays.

Each row is checked before its memory is touched (``tensor_checks``).
"""

from __future__ import annotations

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
    DENSE,
    DTYPE_NUMBERS,
    DTYPES,
    INLINE,
    ITEM_BYTES,
    OFFSET,
    PARAMETER,
    REQUIRES_GRAD,
    ROW,
    WHOLE,
    Buffer,
    Tabled,
)

Tensor = torch.Tensor
BOOL = DTYPE_NUMBERS[torch.bool]
# Users of a part: one row, strided views, or strided views of bools. Bools are checked, so views of
# other dtypes must not write to the same part.
_ONE, _VIEWS, _BOOLS = range(3)


def shape_at(table: Buffer, place: int, dims: int) -> tuple[int, ...]:
    """Return the shape in the row that begins at ``place``."""
    return struct.unpack_from(f"<{dims}q", table, place + ROW.size)


def flagged(tensor: Tensor, flags: int) -> Tensor:
    """Return a tensor as the parameter, or with the ``requires_grad``, that a row's flags name."""
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_()


class RowReader:
    """Reader of the rows that are not inline, one after the other."""

    def __init__(self, table: Buffer, parts: Sequence[Any], is_strict: bool) -> None:
        self.place = 0
        self._table = table
        self._parts = parts
        self._is_strict = is_strict
        self._kinds: dict[int, int] = {}  # users of the parts read so far
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Key: number of a part that views share. Value: bytes that may still be checked per view.
        self._bools_left: dict[int, int] = {}

    def read(self) -> Tabled:
        """Return the next row's object."""
        number, form, flags, part, shape = self._row()
        if form == DENSE:
            tensor = self._dense(number, flags, part, shape)
        elif form <= BYTEARRAY:
            return self._array(number, form, part, shape)
        elif form == COO:
            tensor = self._sparse(number, flags, shape)
        else:
            raise ValueError(f"form {form}")
        return flagged(tensor, flags) if flags & (REQUIRES_GRAD | PARAMETER) else tensor

    def _row(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        number, form, flags, dims, part = ROW.unpack_from(self._table, self.place)
        shape = shape_at(self._table, self.place, dims)
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
        if self._is_strict and number == BOOL:
            checks.require_bools(tensor)
        return tensor

    def _strided(self, number: int, part: int, shape: tuple[int, ...], nbytes: int) -> Tensor:
        (offset,) = OFFSET.unpack_from(self._table, self.place)
        strides = struct.unpack_from(f"<{len(shape)}q", self._table, self.place + 8)
        self.place += 8 + 8 * len(shape)
        memory = self._memory(part, _BOOLS if self._is_strict and number == BOOL else _VIEWS)
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
        if self._is_strict and number == BOOL:
            self._require_bools(tensor, part, storage)
        return tensor

    def _require_bools(self, view: Tensor, part: int, storage: torch.UntypedStorage) -> None:
        # The cost must stay proportional to the part. Views that do not overlap have no more
        # elements than the part has bytes, and are checked one by one, because the bytes between
        # them need not be bools. When the views have more elements than that, the whole part is
        # checked once.
        left = self._bools_left.get(part, storage.nbytes())
        if left < 0:
            return
        self._bools_left[part] = left - view.numel()
        if view.numel() > left:
            self._bools_left[part] = -1
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        checks.require_bools(view)

    def _array(
        self, number: int, form: int, part: int, shape: tuple[int, ...]
    ) -> np.ndarray | bytearray:
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
        if self._is_strict and number == BOOL:
            checks.require_bools(torch.frombuffer(memory, dtype=torch.uint8))
        return np.frombuffer(memory, dtype).reshape(shape)

    def _sparse(self, number: int, flags: int, shape: tuple[int, ...]) -> Tensor:
        indices, values = self._inner(), self._inner()
        checks.require_coo_form(indices, values, shape)
        if values.dtype is not DTYPES[number]:
            raise ValueError(f"values of {values.dtype} for a sparse tensor of {DTYPES[number]}")
        result = torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=self._is_strict, is_coalesced=False
        )
        if flags & COALESCED and self._is_strict:
            checks.require_coalesced(indices, shape)
        return result._coalesced_(bool(flags & COALESCED))

    def _inner(self) -> Tensor:
        """Return the dense tensor of the next row, which is part of a sparse one."""
        number, form, flags, part, shape = self._row()
        # Memory shared with other rows could be changed after the checks.
        if form != DENSE or flags & INLINE or (self._is_strict and not flags & WHOLE):
            raise ValueError(f"form {form} with flags {flags} within a sparse tensor")
        return self._dense(number, flags, part, shape)
