"""Layout of the tensor table: structs, forms, flags and dtype numbers.

::

    rows n u32 | parts used u32 | n rows
    row: dtype u8 | form u8 | flags u8 | dimensions d u8 | part u32 | shape d × i64
         dense: inline: the elements; whole: nothing; else: offset in elements i64, strides d × i64
         sparse (COO): the rows of indices and values
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Buffer: TypeAlias = bytes | bytearray | memoryview
# Memory that is sent for a row: a contiguous tensor, or a buffer.
Part: TypeAlias = torch.Tensor | Buffer
# Objects that a table describes; parameters are tensors.
Tabled: TypeAlias = "torch.Tensor | np.ndarray | bytearray"

COUNTS = struct.Struct("<II")
ROW = struct.Struct("<BBBBI")  # dtype, form, flags, dimensions, part; then the shape
FIRST = struct.Struct("<IIBBBBI")  # the counts and the first row: a table has one at least
SHAPES = [struct.Struct(f"<{dims}q") for dims in range(9)]
HOST = -1  # in the place of a device's index in a device map: the host's memory
OFFSET = struct.Struct("<q")
DENSE, ARRAY, BYTEARRAY, COO = range(4)
REQUIRES_GRAD, WHOLE, INLINE, PARAMETER, COALESCED = 1, 2, 4, 8, 16

# The index of a name is its number on the wire, so new names go to the end.
_DTYPE_NAMES = (
    "float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32",
    "uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
DTYPES: list[Any] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
ITEM_BYTES = [0 if dtype is None else dtype.itemsize for dtype in DTYPES]
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES) if dtype is not None}
ARRAY_DTYPES = [
    np.dtype(name) if hasattr(np, name) or name == "bool" else None for name in _DTYPE_NAMES
]
ARRAY_NUMBERS = {dtype: number for number, dtype in enumerate(ARRAY_DTYPES) if dtype is not None}


def row(number: int, form: int, flags: int, part: int, shape: Sequence[int]) -> bytes:
    """Write the beginning of a row: dtype number, form, flags, part and shape."""
    return ROW.pack(number, form, flags, len(shape), part) + struct.pack(f"<{len(shape)}q", *shape)
