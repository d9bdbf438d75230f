"""Rows whose elements are elsewhere: parts of one row or of several views, and their checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpidist.comm.serialization import row_reader
from mpidist.comm.serialization.row_reader import RowReader, flagged, shape_at
from mpidist.comm.serialization.tensor_format import (
    ARRAY,
    BYTEARRAY,
    DENSE,
    PARAMETER,
    REQUIRES_GRAD,
    WHOLE,
)
from tests.comm.serialization.forged_tables import BOOL, F32, U8, row, strides


def reader(rows, parts, is_strict=False):
    return RowReader(b"".join(rows), [memoryview(bytearray(part)) for part in parts], is_strict)


def test_rows_follow_one_another():
    rows = [
        row(F32, DENSE, WHOLE, 0, (2, 1)),
        row(U8, ARRAY, 0, 1, (3,)),
        row(0, BYTEARRAY, 0, 2, ()),
    ]
    found = reader(rows, [np.float32([1, 2]).tobytes(), b"abc", b"de"])
    assert shape_at(rows[0], 0, 2) == (2, 1)
    assert found.read().tolist() == [[1.0], [2.0]] and found.place == len(rows[0])
    assert found.read().tobytes() == b"abc" and found.read() == bytearray(b"de")
    assert found.place == sum(map(len, rows))


def test_flags_make_parameters_and_leaves():
    leaf = flagged(torch.ones(1), REQUIRES_GRAD)
    frozen = flagged(torch.ones(1), PARAMETER)
    trained = flagged(torch.ones(1), PARAMETER | REQUIRES_GRAD)
    assert leaf.requires_grad and type(leaf) is torch.Tensor
    assert type(frozen) is type(trained) is torch.nn.Parameter
    assert (frozen.requires_grad, trained.requires_grad) == (False, True)


def views(number, *shapes_and_strides):
    return [row(number, DENSE, 0, 0, shape, strides(*at)) for shape, at in shapes_and_strides]


def test_views_of_one_part_share_memory():
    found = reader(views(F32, ((2,), (0, 1)), ((2,), (1, 1))), [bytes(12)])
    first, second = found.read(), found.read()
    first[1] = 5.0
    assert second[0] == 5.0


@pytest.mark.parametrize(
    "rows",
    [
        [row(U8, DENSE, WHOLE, 0, (4,)), row(U8, DENSE, WHOLE, 0, (4,))],
        [row(U8, DENSE, WHOLE, 0, (4,)), row(U8, ARRAY, 0, 0, (4,))],
        [row(U8, DENSE, WHOLE, 0, (4,)), *views(U8, ((4,), (0, 1)))],
    ],
)
def test_a_part_of_one_row_is_no_others(rows):
    found = reader(rows, [bytes(4)])
    found.read()
    with pytest.raises(ValueError, match="part 0 is another row's as well"):
        found.read()


def test_bools_and_others_do_not_share_a_part_for_a_strict_reader():
    rows = [*views(BOOL, ((4,), (0, 1))), *views(U8, ((4,), (0, 1)))]
    found = reader(rows, [bytes(4)])
    found.read(), found.read()
    found = reader(rows, [bytes(4)], is_strict=True)
    found.read()
    with pytest.raises(ValueError, match="another row's"):
        found.read()


def test_bools_are_checked_at_a_cost_of_the_part(monkeypatch):
    checked = []
    monkeypatch.setattr(
        row_reader.checks, "require_bools", lambda tensor: checked.append(tensor.numel())
    )
    found = reader(views(BOOL, *[((3,), (0, 1))] * 5), [bytes(4)], is_strict=True)
    for _ in range(5):
        found.read()
    assert checked == [3, 4]  # a view, then the whole part once


def test_sizes_must_be_those_of_the_part():
    for rows in (
        [row(F32, DENSE, WHOLE, 0, (2,))],
        [row(U8, ARRAY, 0, 0, (3,))],
        [row(0, BYTEARRAY, 0, 0, (4,))],
        views(F32, ((2,), (0, 1))),
    ):
        with pytest.raises(ValueError, match=r"of 4 bytes|with sizes|leave 4 bytes"):
            reader(rows, [bytes(4)]).read()
    expanded = views(U8, ((8,), (0, 0)))
    assert reader(expanded, [bytes(4)]).read().tolist() == [0] * 8
    with pytest.raises(ValueError, match="8 bytes of elements in a part of 4"):
        reader(expanded, [bytes(4)], is_strict=True).read()
