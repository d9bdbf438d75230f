"""Attacks by tensor tables that do not match their data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.serialization.tensor_format import (
    ARRAY,
    ARRAY_NUMBERS,
    BYTEARRAY,
    COALESCED,
    COMPRESSED,
    COO,
    COUNTS,
    DENSE,
    DTYPE_NUMBERS,
    INLINE,
    OFFSET,
    PARAMETER,
    PER_CHANNEL,
    PER_TENSOR,
    REQUIRES_GRAD,
    ROW,
    SCALE,
    WHOLE,
)
from mpidist.rpc.message import FAR
from mpidist.rpc.values.codec import LONE_ARGUMENT, TABLE
from tests.comm.serialization.forged_tables import BOOL, F32, I64, U8, floats, words
from tests.rpc.attacks.attacker import Attacker, Attacks

attack = Attacks()

REFUSED = "FrameError"
TOUCHED = "tests.rpc.attacks.victim:touched"
F64 = DTYPE_NUMBERS[torch.float64]


def row(
    number: int, form: int, flags: int, shape: Sequence[int], part: int = 0, dims: int | None = None
) -> bytes:
    """Write the head of a row; ``dims`` in the place of the right number of dimensions."""
    return ROW.pack(number, form, flags, len(shape) if dims is None else dims, part) + words(*shape)


def inline(number: int, shape: Sequence[int], data: bytes = b"", flags: int = 0) -> bytes:
    """Write a row with its elements behind it."""
    return row(number, DENSE, INLINE | WHOLE | flags, shape) + data


def strided(
    number: int, shape: Sequence[int], strides: Sequence[int], offset: int = 0, part: int = 0
) -> bytes:
    """Write a row that views a part."""
    return row(number, DENSE, 0, shape, part) + words(offset, *strides)


def register(
    name: str,
    idea: str,
    rows: bytes,
    parts: Sequence[bytes] = (),
    count: int = 1,
    used: int | None = None,
) -> None:
    """Register an attack by a call with one tensor, whose table has these rows and parts."""

    def run(attacker: Attacker) -> object:
        table = COUNTS.pack(count, len(parts) if used is None else used) + rows
        body = table + LONE_ARGUMENT
        if len(body) > 8000:
            return attacker.call(TOUCHED, b"", flags=TABLE | FAR, parts=[body, *parts])
        return attacker.call(TOUCHED, body, flags=TABLE, parts=[bytearray(part) for part in parts])

    run.__name__ = name
    attack(idea, REFUSED)(run)


# Dense.
register("unknown_dtype", "A number of a dtype that there is not", inline(200, (1,), b"\0" * 8))
register("dtype_in_a_part", "… of a tensor in a part", row(200, DENSE, WHOLE, (1,)), [b"\0" * 8])
register("unknown_form", "A form of row that there is not", row(F32, 99, 0, (1,)), [b"\0" * 8])
register("negative_size", "A size below 0", inline(F32, (-1,), b"\0" * 4))
register(
    "two_negative_sizes",
    "Two sizes below 0, whose product is not",
    inline(F32, (-2, -2), b"\0" * 16),
)
register("huge_size", "2^62 elements inline", inline(F32, (1 << 62,), b"\0" * 4))
register(
    "overflowing_sizes",
    "Sizes whose product is 0 in 64 bits",
    row(F32, DENSE, WHOLE, (1 << 32, 1 << 32)),
    [b"\0" * 4],
)
register(
    "huge_beside_zero",
    "No elements, and sizes whose product overflows",
    inline(F32, (0, 1 << 62, 1 << 62)),
)
register(
    "huge_beside_zero_strided",
    "… with strides",
    strided(F32, (0, 1 << 62, 1 << 62), (1, 1, 1)),
    [b"\0" * 4],
)
register(
    "dimensions",
    "255 dimensions announced, one there",
    row(F32, DENSE, INLINE | WHOLE, (1,), dims=255) + b"\0" * 4,
)
register(
    "cut_off", "Elements inline, cut off", COUNTS.pack(1, 0)[8:] + inline(F32, (1000,), b"\0" * 4)
)
register(
    "no_bytes",
    "A thousand elements over an empty part: memory that nobody has written",
    row(F32, DENSE, WHOLE, (1000,)),
    [b""],
)
register(
    "few_bytes", "A thousand elements over eight bytes", strided(F32, (1000,), (1,)), [b"\1" * 8]
)
register("few_bytes_whole", "… as a whole part", row(F32, DENSE, WHOLE, (1000,)), [b"\1" * 8])
register("odd_bytes", "Seven bytes of float32", row(F32, DENSE, WHOLE, (1,)), [b"\1" * 7])
register("more_bytes", "More bytes than the tensor has", row(F32, DENSE, WHOLE, (1,)), [b"\1" * 64])
register(
    "offset_behind", "An offset behind the end", strided(F32, (2,), (1,), offset=1), [b"\0" * 8]
)
register("offset_below", "An offset below 0", strided(F32, (1,), (1,), offset=-1), [b"\0" * 8])
register(
    "offset_huge",
    "An offset that overflows in bytes",
    strided(F32, (1,), (1,), offset=1 << 62),
    [b"\0" * 8],
)
register(
    "stride_behind", "A stride that leaves the part", strided(F32, (2, 2), (100, 1)), [b"\0" * 16]
)
register("stride_below", "A stride below 0", strided(F32, (2,), (-1,), offset=1), [b"\0" * 8])
register(
    "stride_huge", "A stride whose span overflows", strided(F32, (3,), (1 << 62,)), [b"\0" * 8]
)
register("expanded", "One element as 2^40 of them", strided(F32, (1 << 40,), (0,)), [b"\0" * 4])
register(
    "overlapping",
    "Windows that overlap: 10^6 elements of 2,000",
    strided(F32, (1000, 1000), (1, 1)),
    [b"\0" * 8000],
)
register("no_part", "A part that did not come", row(F32, DENSE, WHOLE, (1,)), [], used=1)
register(
    "part_beyond",
    "A part beyond those that came",
    row(F32, DENSE, WHOLE, (1,), part=7),
    [b"\0" * 4],
)
register(
    "part_too_many",
    "A part that no row describes",
    inline(F32, (1,), b"\0" * 4),
    [b"\0" * 4],
    used=0,
)
register("row_missing", "Two rows announced, one there", inline(F32, (1,), b"\0" * 4), count=2)
register(
    "rows_announced", "2^32 - 1 rows announced", inline(F32, (1,), b"\0" * 4), count=(1 << 32) - 1
)
register("no_rows", "No row, and a mark of an object", b"", count=0)
register(
    "parts_announced", "2^32 - 1 parts announced", inline(F32, (1,), b"\0" * 4), used=(1 << 32) - 1
)
register("bool_two", "A bool that is 2: undefined in C++", inline(BOOL, (3,), b"\0\2\1"))
register("bool_in_a_part", "… in a part", row(BOOL, DENSE, WHOLE, (3,)), [b"\0\2\1"])
register("bool_strided", "… of a view", strided(BOOL, (2,), (2,)), [b"\0\1\xff\1"])
register(
    "parameter_of_ints",
    "A parameter of integers that requires a gradient",
    inline(I64, (1,), b"\0" * 8, PARAMETER | REQUIRES_GRAD),
)
register(
    "gradient_of_ints",
    "Integers that require a gradient",
    inline(I64, (1,), b"\0" * 8, REQUIRES_GRAD),
)

# Arrays and bytearrays.
register(
    "array_dtype", "An array's dtype that there is not", row(200, ARRAY, 0, (2,)), [b"\0" * 16]
)
register(
    "array_shape",
    "An array larger than its bytes",
    row(ARRAY_NUMBERS[torch.zeros(1).numpy().dtype], ARRAY, 0, (1000,)),
    [b"\0" * 8],
)
register(
    "array_negative",
    "An array of size -1: numpy counts by itself",
    row(F32, ARRAY, 0, (-1,)),
    [b"\0" * 8],
)
register("array_empty", "An array of elements over no bytes", row(F32, ARRAY, 0, (10,)), [b""])
register("array_bool", "An array's bool that is 2", row(BOOL, ARRAY, 0, (2,)), [b"\0\2"])
register(
    "array_overflow",
    "An array whose size overflows",
    row(F32, ARRAY, 0, (1 << 32, 1 << 32)),
    [b"\0" * 8],
)
register(
    "bytearray_part",
    "A bytearray of a part that did not come",
    row(0, BYTEARRAY, 0, (), part=3),
    [b"\0" * 8],
)

# Sparse and quantized: rows of rows, each in a part of its own.


class Rows:
    """Rows of one object, and their parts."""

    def __init__(self) -> None:
        self.data = b""
        self.parts: list[bytes] = []

    def add(self, head: bytes) -> Rows:
        """Add what needs no part."""
        self.data += head
        return self

    def whole(self, number: int, shape: Sequence[int], data: bytes, form: int = DENSE) -> Rows:
        """Add a row with its elements in a part."""
        self.data += row(number, form, WHOLE, shape, len(self.parts))
        self.parts.append(data)
        return self

    def ints(self, shape: Sequence[int], *values: int) -> Rows:
        """Add a row of int64."""
        return self.whole(I64, shape, words(*values))

    def floats(self, *values: float) -> Rows:
        """Add a vector of float32."""
        return self.whole(F32, (len(values),), floats(*values))

    def register(self, name: str, idea: str) -> None:
        """Note an attack with these rows."""
        register(name, idea, self.data, self.parts)


def coo(shape: Sequence[int] = (4,), flags: int = 0) -> Rows:
    """Begin a sparse tensor: indices and values follow."""
    return Rows().add(row(F32, COO, flags, shape))


coo().ints((1, 2), 0, 4).floats(1, 2).register("coo_behind", "An index behind the end")
coo().ints((1, 2), 0, 1 << 40).floats(1, 2).register("coo_far_behind", "An index 2^40 behind it")
coo().ints((1, 2), -1, 0).floats(1, 2).register("coo_below", "An index below 0")
coo(flags=COALESCED).ints((1, 2), 1, 1).floats(1, 2).register(
    "coo_claim_double", "Indices twice, said to be coalesced"
)
coo(flags=COALESCED).ints((1, 2), 3, 0).floats(1, 2).register(
    "coo_claim_order", "Indices out of order, said to be coalesced"
)
coo().ints((1, 3), 0, 1, 2).floats(1, 2).register("coo_counts", "More indices than values")
coo().whole(F32, (1, 2), b"\0" * 8).floats(1, 2).register(
    "coo_float_indices", "Indices that are floats"
)
coo().ints((2, 2), 0, 0, 0, 0).floats(1, 2).register(
    "coo_dims", "Indices of two dimensions for a vector"
)
coo((-4,)).ints((1, 2), 0, 1).floats(1, 2).register("coo_negative_shape", "A size below 0")
coo((1 << 40, 1 << 40)).ints((2, 2), 0, 1, 0, 1).floats(1, 2).register(
    "coo_huge_shape", "A shape whose product overflows"
)
coo().ints((1, 2), 0, 1).whole(I64, (2,), words(1, 2)).register(
    "coo_type", "Values of another type than the tensor's"
)
coo().add(row(F32, COO, 0, (4,))).ints((1, 2), 0, 1).floats(1, 2).floats(1, 2).register(
    "coo_of_coo", "Indices that are sparse"
)
coo().ints((1, 2), 0, 1).whole(F32, (2,), b"\0" * 8, ARRAY).register(
    "coo_of_array", "Values that are an array"
)
coo().add(inline(I64, (1, 2), words(0, 9))).add(inline(F32, (2,), b"\0" * 8)).register(
    "coo_inline", "An index behind the end, inline"
)
Rows().add(row(F32, COO, 0, (4,)) * 3000).register(
    "coo_within", "Sparse tensors within each other, 3,000 deep"
)


def csr(compressed: Sequence[int], plain: Sequence[int], shape: Sequence[int] = (2, 3)) -> Rows:
    """Write a matrix by rows."""
    head = Rows().add(row(F32, COMPRESSED[torch.sparse_csr], 0, shape))
    return head.ints((len(compressed),), *compressed).ints((len(plain),), *plain).floats(1, 2)


csr((0, 1, 2), (0, 3)).register("csr_column", "A column behind the end")
csr((0, 1, 2), (0, -1)).register("csr_column_below", "A column below 0")
csr((0, 1, 1000), (0, 1)).register("csr_rows_behind", "Row bounds behind the end")
csr((-5, 1, 2), (0, 1)).register("csr_rows_below", "Row bounds below 0")
csr((0, 2, 1), (0, 1)).register("csr_rows_falling", "Row bounds that fall")
csr((0, 2), (0, 1)).register("csr_rows_few", "Too few row bounds")
csr((0, 1, 2), (0, 1), (6,)).register("csr_vector", "A shape of one dimension")


def by_tensor(scale: float, zero: int) -> Rows:
    """Begin a quantized tensor."""
    return Rows().add(row(0, PER_TENSOR, 0, (2,)) + SCALE.pack(scale, zero))


def by_channel(axis: int) -> Rows:
    """Begin a tensor that is quantized by channels, with its integers."""
    return Rows().add(row(0, PER_CHANNEL, 0, (2,)) + OFFSET.pack(axis)).whole(U8, (2,), b"\1\2")


by_tensor(float("nan"), 0).whole(U8, (2,), b"\1\2").register(
    "quantized_nan", "A scale that is no number"
)
by_tensor(float("inf"), 0).whole(U8, (2,), b"\1\2").register(
    "quantized_infinite", "An infinite scale"
)
by_tensor(1.0, 1 << 40).whole(U8, (2,), b"\1\2").register(
    "quantized_zero_point", "A zero point beyond the type"
)
by_tensor(1.0, 0).floats(1, 2).register("quantized_floats", "Integers that are floats")
by_tensor(1.0, 0).add(by_tensor(1.0, 0).data).whole(U8, (2,), b"\1\2").register(
    "quantized_within", "… that are quantized themselves"
)
by_channel(5).whole(F64, (2,), b"\0" * 16).ints((2,), 0, 0).register(
    "channel_axis", "An axis that there is not"
)
by_channel(-(1 << 40)).whole(F64, (2,), b"\0" * 16).ints((2,), 0, 0).register(
    "channel_axis_below", "An axis far below 0"
)
by_channel(0).whole(F64, (1,), b"\0" * 8).ints((2,), 0, 0).register(
    "channel_scales", "Fewer scales than channels"
)


@attack("A bool that is 2 behind a head that has been read before", REFUSED)
def bool_seen(attacker: Attacker) -> object:
    for data in (b"\0\1", b"\0\1"):
        attacker.call(
            TOUCHED, COUNTS.pack(1, 0) + inline(BOOL, (2,), data) + LONE_ARGUMENT, flags=TABLE
        )
    return attacker.call(
        TOUCHED, COUNTS.pack(1, 0) + inline(BOOL, (2,), b"\0\2") + LONE_ARGUMENT, flags=TABLE
    )


@attack("A table is announced, and nothing is there", REFUSED)
def no_table(attacker: Attacker) -> object:
    return attacker.call(TOUCHED, b"\0", flags=TABLE)


@attack("A content is announced as a part, and no part comes", REFUSED)
def no_content(attacker: Attacker) -> object:
    return attacker.call(TOUCHED, b"", flags=FAR)


@attack("A content in a part ends within its table", REFUSED)
def far_cut_off(attacker: Attacker) -> object:
    body: Any = COUNTS.pack(1, 0) + inline(F32, (4,), b"\0" * 16)
    return attacker.call(TOUCHED, b"", flags=TABLE | FAR, parts=[body[:-4]])
