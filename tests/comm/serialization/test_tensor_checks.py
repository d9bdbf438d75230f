"""Forged tensor tables: refused before memory is touched, or safe to use.

A strict reader checks values too.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mpidist.comm.serialization import row_reader, tensor_format, tensor_rebuild, tensor_table
from mpidist.comm.serialization import tensor_checks as checks
from mpidist.comm.serialization.tensor_format import (
    ARRAY,
    DENSE,
    INLINE,
    WHOLE,
)
from mpidist.errors import FrameError
from tests.bytes_fuzz import tables
from tests.bytes_fuzz.tables import described
from tests.comm.serialization.forged_tables import (
    BOOL,
    F32,
    REFUSED,
    REFUSED_IF_STRICT,
    read,
    row,
    strided,
    whole,
)

CASES = int(os.environ.get("MPIDIST_FUZZ_CASES", "250"))
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("case", REFUSED)
def test_structure_is_checked_before_memory_is_touched(case):
    for rows, parts in REFUSED[case]:
        for is_strict in (False, True):
            with pytest.raises(FrameError):
                read(rows, parts, is_strict)


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
        return (
            left.dtype == right.dtype
            and left.layout == right.layout
            and torch.equal(left.detach().to_dense(), right.detach().to_dense())
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
