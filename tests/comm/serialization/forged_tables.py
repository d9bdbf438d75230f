"""Forged tensor tables by name, and the functions that write their rows."""

from __future__ import annotations

import struct

import numpy as np
import torch

from mpidist.comm.serialization import tensor_rebuild
from mpidist.comm.serialization.tensor_format import (
    ARRAY,
    ARRAY_NUMBERS,
    BYTEARRAY,
    COALESCED,
    COO,
    COUNTS,
    DENSE,
    DTYPE_NUMBERS,
    INLINE,
    ROW,
    WHOLE,
)

F32, I64, U8, BOOL = (
    DTYPE_NUMBERS[dtype] for dtype in (torch.float32, torch.int64, torch.uint8, torch.bool)
)


def row(number, form, flags, part, shape, *behind):
    return (
        ROW.pack(number, form, flags, len(shape), part)
        + struct.pack(f"<{len(shape)}q", *shape)
        + b"".join(behind)
    )


def strides(offset, *numbers):
    return struct.pack(f"<{1 + len(numbers)}q", offset, *numbers)


def read(rows, parts=(), is_strict=False):
    table = COUNTS.pack(len(rows), len(parts)) + b"".join(rows)
    return tensor_rebuild.read(
        bytearray(table), 0, [memoryview(bytearray(part)) for part in parts], is_strict=is_strict
    )[0]


def strided(shape, offset, numbers, number=F32):
    return row(number, DENSE, 0, 0, shape, strides(offset, *numbers))


def coo(indices, values, shape, flags=0, number=F32):
    """Return a COO tensor over parts 0 and 1."""
    return row(number, COO, flags, 0, shape, indices, values)


def words(*numbers):
    return struct.pack(f"<{len(numbers)}q", *numbers)


def floats(*numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


def whole(number, part, *shape):
    return row(number, DENSE, WHOLE, part, shape)


HUGE = (1 << 62, (1 << 63) - 1, 1 << 40)
REFUSED = {
    "negative sizes": [([row(F32, DENSE, INLINE | WHOLE, 0, (-2, -2), bytes(16))], [])],
    "a size below zero beside none": [([row(F32, DENSE, INLINE | WHOLE, 0, (0, -5))], [])],
    "no elements, and sizes beyond": [
        ([row(F32, DENSE, flags, 0, (0, *HUGE))], [b""]) for flags in (WHOLE, WHOLE | INLINE)
    ]
    + [([row(ARRAY_NUMBERS[np.dtype("f4")], ARRAY, 0, 0, (0, *HUGE))], [b""])]
    + [([strided((0, *HUGE), 0, (1, 1, 1, 1))], [b""])],
    "too few bytes": [([whole(F32, 0, 5)], [bytes(16)]), ([whole(F32, 0, 5)], [b""])],
    "too many bytes": [([whole(F32, 0, 5)], [bytes(24)]), ([whole(F32, 0, 0)], [bytes(4)])],
    "an array of other bytes": [
        ([row(F32, ARRAY, 0, 0, shape)], [bytes(16)]) for shape in ((5,), (3,), (-1,), (-2, -2))
    ],
    "a negative offset": [([strided((2,), -1, (1,))], [bytes(16)])],
    "a negative stride": [([strided((2,), 3, (-1,))], [bytes(16)])],
    "beyond the part": [
        ([strided(shape, offset, (step,))], [bytes(16)])
        for shape, offset, step in (
            ((5,), 0, 1),
            ((2,), 3, 1),
            ((2,), 0, 4),
            ((1,), 4, 1),
            ((2,), 0, 1 << 62),
            ((1 << 62,), 0, 1),
        )
    ],
    "no elements beyond the part": [([strided((0,), 5, (1,))], [bytes(16)])],
    "elements of no part": [([strided((2,), 0, (1,))], [b""])],
    "a part of another table": [([whole(F32, 1, 4)], [bytes(16)])],
    "a part twice": [
        ([first, second], [bytes(16)])
        for first in (whole(F32, 0, 4), row(F32, ARRAY, 0, 0, (4,)), row(0, BYTEARRAY, 0, 0, ()))
        for second in (whole(I64, 0, 2), strided((4,), 0, (1,)), row(0, BYTEARRAY, 0, 0, ()))
    ],
    "a bytearray with sizes": [([row(0, BYTEARRAY, 0, 0, (4,))], [bytes(4)])],
    "sparse within sparse": [
        (
            [coo(coo(whole(I64, 0, 1, 1), whole(F32, 1, 1), (2,)), whole(F32, 1, 1), (2,))],
            [words(0), floats(1)],
        )
    ],
    "inline within sparse": [
        (
            [coo(row(I64, DENSE, INLINE | WHOLE, 0, (1, 1), words(0)), whole(F32, 0, 1), (2,))],
            [floats(1)],
        )
    ],
    "a form without name": [([row(F32, 77, 0, 0, (1,))], [])],
    "indices and values of other lengths": [
        ([coo(whole(I64, 0, 1, 2), whole(F32, 1, 1), (2,))], [words(0, 1), floats(1)])
    ],
    "indices of another dtype": [
        ([coo(whole(F32, 0, 1, 1), whole(F32, 1, 1), (2,))], [floats(0), floats(1)])
    ],
    "other dimensions": [
        ([coo(whole(I64, 0, 1, 1), whole(F32, 1, 1), (2, 2))], [words(0), floats(1)])
    ],
    "values of another dtype": [
        ([coo(whole(I64, 0, 1, 1), whole(F32, 1, 1), (2,), number=I64)], [words(0), floats(1)])
    ],
}

REFUSED_IF_STRICT = {
    "more elements than bytes": [
        ([strided((1 << 40,), 0, (0,))], [bytes(4)]),
        ([strided((2, 3), 0, (1, 1))], [bytes(20)]),
    ],
    "a bool of 2": [
        ([row(BOOL, DENSE, INLINE | WHOLE, 0, (3,), b"\0\1\2")], []),
        ([row(BOOL, DENSE, INLINE | WHOLE, 0, (), b"\xff")] * 2, []),
        ([whole(BOOL, 0, 3)], [b"\1\1\x80"]),
        ([strided((2,), 1, (1,), BOOL)], [b"\0\0\2"]),
        ([row(BOOL, ARRAY, 0, 0, (2,))], [b"\1\3"]),
    ],
    "bools that share their memory with bytes": [
        ([strided((3,), 0, (1,), BOOL), strided((3,), 0, (1,), U8)], [b"\1\1\1"])
    ],
    "an index out of range": [
        ([coo(whole(I64, 0, 1, 1), whole(F32, 1, 1), (2,))], [words(place), floats(1)])
        for place in (2, -1, 1 << 62)
    ],
    "not coalesced, and said to be": [
        (
            [coo(whole(I64, 0, 1, 2), whole(F32, 1, 2), (3,), COALESCED)],
            [words(*places), floats(1, 2)],
        )
        for places in ((1, 0), (1, 1))
    ],
    "two dimensions not coalesced": [
        (
            [coo(whole(I64, 0, 2, 2), whole(F32, 1, 2), (3, 3), COALESCED)],
            [words(1, 1, 2, 2), floats(1, 2)],
        ),
        (
            [coo(whole(I64, 0, 2, 2), whole(F32, 1, 2), (3, 3), COALESCED)],
            [words(2, 1, 0, 2), floats(1, 2)],
        ),
    ],
    "indices that another row may change": [
        (
            [
                coo(row(I64, DENSE, 0, 0, (1, 1), strides(0, 1, 1)), whole(F32, 1, 1), (2,)),
                strided((1,), 0, (1,), I64),
            ],
            [words(0), floats(1)],
        )
    ],
}
