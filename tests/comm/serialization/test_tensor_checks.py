"""Forged tensor tables: refused before memory is touched, or safe to use.

A strict reader checks values too.
"""

from __future__ import annotations

import os
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mpidist.comm.serialization import row_reader, tensor_format, tensor_rebuild, tensor_table
from mpidist.comm.serialization import tensor_checks as checks
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
    PER_CHANNEL,
    PER_TENSOR,
    ROW,
    SCALE,
    WHOLE,
)
from mpidist.errors import FrameError
from tests.bytes_fuzz import tables
from tests.bytes_fuzz.tables import described

CASES = int(os.environ.get("MPIDIST_FUZZ_CASES", "600"))
F32, I64, U8, BOOL = (
    DTYPE_NUMBERS[dtype] for dtype in (torch.float32, torch.int64, torch.uint8, torch.bool)
)
I8 = DTYPE_NUMBERS[torch.int8]
pytestmark = pytest.mark.filterwarnings("ignore")


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
    "compressed rows of another number": [
        (
            [
                row(
                    F32,
                    COMPRESSED[torch.sparse_csr],
                    0,
                    0,
                    (5, 5),
                    whole(I64, 0, 2),
                    whole(I64, 1, 1),
                    whole(F32, 2, 1),
                )
            ],
            [words(0, 1), words(0), floats(1)],
        )
    ],
    "blocks that do not divide": [
        (
            [
                row(
                    F32,
                    COMPRESSED[torch.sparse_bsr],
                    0,
                    0,
                    shape,
                    whole(I64, 0, 2),
                    whole(I64, 1, 1),
                    whole(F32, 2, 1, 2, blocks),
                )
            ],
            [words(0, 1), words(0), floats(*[1.0] * 2 * blocks)],
        )
        for shape, blocks in (((3, 2), 2), ((2, 2), 0))
    ],
    "an axis that is none": [
        (
            [
                row(
                    0,
                    PER_CHANNEL,
                    0,
                    0,
                    (2, 1),
                    OFFSET.pack(axis),
                    whole(I8, 0, 2, 1),
                    whole(F32, 1, size),
                    whole(I64, 2, size),
                )
            ],
            [bytes(2), floats(*[1.0] * size), words(*[0] * size)],
        )
        for axis, size in ((2, 2), (-1, 2), (0, 1), (0, 3), (1 << 40, 2))
    ],
    "a quantized tensor of other sizes": [
        ([row(0, PER_TENSOR, 0, 0, (3,), SCALE.pack(1.0, 0), whole(I8, 0, 2))], [bytes(2)])
    ],
    "quantized floats": [
        ([row(0, PER_TENSOR, 0, 0, (2,), SCALE.pack(1.0, 0), whole(F32, 0, 2))], [bytes(8)])
    ],
}


@pytest.mark.parametrize("case", REFUSED)
def test_structure_is_checked_before_memory_is_touched(case):
    for rows, parts in REFUSED[case]:
        for is_strict in (False, True):
            with pytest.raises(FrameError):
                read(rows, parts, is_strict)


csr = COMPRESSED[torch.sparse_csr]
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
    "compressed indices out of range": [
        (
            [row(F32, csr, 0, 0, (1, 2), whole(I64, 0, 2), whole(I64, 1, 1), whole(F32, 2, 1))],
            [words(*rows), words(column), floats(1)],
        )
        for rows, column in (((0, 1), 2), ((0, 1), -1), ((0, 9), 0), ((1, 1), 0), ((-5, 1), 0))
    ],
    "a scale that is none": [
        ([row(0, PER_TENSOR, 0, 0, (2,), SCALE.pack(scale, 0), whole(I8, 0, 2))], [bytes(2)])
        for scale in (float("nan"), float("inf"), -float("inf"))
    ],
    "a zero point out of range": [
        ([row(0, PER_TENSOR, 0, 0, (2,), SCALE.pack(1.0, zero), whole(number, 0, 2))], [bytes(2)])
        for zero, number in ((128, I8), (-129, I8), (256, U8), (-1, U8), (1 << 40, I8))
    ],
    "channels out of range": [
        (
            [
                row(
                    0,
                    PER_CHANNEL,
                    0,
                    0,
                    (1, 2),
                    OFFSET.pack(0),
                    whole(I8, 0, 1, 2),
                    whole(F32, 1, 1),
                    whole(I64, 2, 1),
                )
            ],
            [bytes(2), floats(scale), words(zero)],
        )
        for scale, zero in ((float("nan"), 0), (1.0, 200))
    ],
}


@pytest.mark.parametrize("case", REFUSED_IF_STRICT)
def test_a_strict_reader_checks_values(case):
    for rows, parts in REFUSED_IF_STRICT[case]:
        with pytest.raises(FrameError):
            read(rows, parts, True)


def test_a_cached_beginning_bypasses_no_check():
    """The bytes in front of the elements are cached, but bools are always checked."""
    table = bytearray(described([torch.tensor([True, False])])[0])
    tensor_rebuild.read(table, 0, [])
    table[-1] = 9
    lone = tensor_rebuild.read_lone(table, 0)
    assert lone is None
    with pytest.raises(FrameError, match="bool"):
        tensor_rebuild.read(table, 0, [], is_strict=True)


def test_a_dtype_that_this_torch_lacks_has_no_elements_of_another(monkeypatch):
    for name, value in (("DTYPES", None), ("ITEM_BYTES", 0), ("ARRAY_DTYPES", None)):
        for module in (row_reader, tensor_rebuild):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, [value, *getattr(tensor_format, name)[1:]])
    assert F32 == 0
    for rows, parts in (
        ([row(F32, DENSE, INLINE | WHOLE, 0, (1 << 40,))], []),
        ([row(F32, DENSE, INLINE | WHOLE, 0, ())], []),
        ([row(F32, DENSE, INLINE | WHOLE, 0, (5,))] * 2, []),
        ([whole(F32, 0, 5)], [b""]),
        ([strided((5,), 0, (0,))], [b""]),
        ([row(F32, ARRAY, 0, 0, (1,))], [bytes(8)]),
        ([row(F32, ARRAY, 0, 0, (1 << 40,))], [b""]),
    ):
        for is_strict in (False, True):
            with pytest.raises(FrameError, match="does not know"):
                read(rows, parts, is_strict)


def equal(left, right):
    if isinstance(left, torch.Tensor):
        dense = (
            (lambda one: one.dequantize())
            if left.is_quantized
            else (lambda one: one.detach().to_dense())
        )
        return (
            left.dtype == right.dtype
            and left.layout == right.layout
            and torch.equal(dense(left), dense(right))
        )
    return (
        left.dtype == right.dtype and np.array_equal(left, right)
        if isinstance(left, np.ndarray)
        else left == right
    )


@pytest.mark.parametrize("name", tables.objects())
def test_a_strict_reader_takes_what_is_described_for_it(name):
    objects = tables.objects()[name]
    for chosen in (objects, [*objects, *objects], [torch.ones(2), *objects]):
        table, parts = described(chosen)
        found, used, end = tensor_rebuild.read(table, 0, parts, is_strict=True)
        assert used == len(parts) and end == len(table)
        assert len(found) == len(chosen) and all(map(equal, found, chosen))
        assert tables.check(tables.packed(table, parts))


def test_what_is_dense_still_shares_memory_where_it_may():
    base, flags = torch.arange(24.0).view(4, 6), torch.zeros(4, 4, dtype=torch.bool)
    table, parts = described([base[:2], base.t(), flags[0], flags.view(torch.uint8), flags[:, 1:]])
    rows, turned, first, as_bytes, rest = tensor_rebuild.read(table, 0, parts, is_strict=True)[0]
    rows.fill_(7)
    assert turned[:, :2].eq(7).all()
    as_bytes.fill_(9)
    first.fill_(True)
    assert rest[0].all() and not rest[1:].any() and as_bytes.eq(9).all()


def test_what_is_dense_has_no_more_elements_than_bytes():
    one = torch.ones(1)
    _, parts, _ = tensor_table.describe([one.expand(20_000), one], is_dense=True)
    assert sum(part.nbytes for part in parts) >= 80_000
    _, parts, _ = tensor_table.describe([one.expand(20_000), one])
    assert sum(part.nbytes for part in parts) == 4


def test_packed_integers_of_less_than_a_byte_are_no_row():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_channel(
            torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2
        )
    assert not tensor_table.is_describable(tensor)


@settings(max_examples=CASES, deadline=None)
@given(tables.cases(tuple(tables.samples())))
def test_whatever_a_table_says_it_is_refused_or_what_comes_out_can_be_used(case):
    tables.check(case)


def test_views_of_bools_cost_no_more_than_their_part(monkeypatch):
    looked = []
    require = checks.require_bools
    monkeypatch.setattr(
        checks, "require_bools", lambda data: (looked.append(data.numel()), require(data))
    )
    part = bytes(4096)
    result = read([strided((4096,), 0, (1,), BOOL)] * 50, [part], is_strict=True)
    assert len(result) == 50
    assert sum(looked) <= 2 * len(part)


@pytest.mark.parametrize("views", [1, 2, 3])
def test_views_of_bools_that_overlap_are_checked_all_the_same(views):
    part = bytes(15) + b"\2"
    with pytest.raises(FrameError, match="bool"):
        read(
            [strided((15,), 0, (1,), BOOL)] * (views - 1) + [strided((16,), 0, (1,), BOOL)],
            [part],
            is_strict=True,
        )


def test_what_lies_between_views_of_bools_need_not_be_bools():
    left, right = read(
        [strided((4,), 0, (4,), BOOL), strided((4,), 1, (4,), BOOL)],
        [b"\1\0\7\7" * 4],
        is_strict=True,
    )
    assert left.all() and not right.any()
