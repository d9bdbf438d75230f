"""Inline rows: which tensors are in their rows, and the bytes of a row."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.serialization import inline_rows
from mpidist.comm.serialization.inline_rows import INLINE_BYTES, inline_row, inline_table
from mpidist.comm.serialization.tensor_format import (
    COUNTS,
    DENSE,
    DTYPE_NUMBERS,
    INLINE,
    PARAMETER,
    REQUIRES_GRAD,
    WHOLE,
    row,
)


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_row_is_its_head_and_the_tensors_own_memory(is_parameter, requires_grad):
    tensor = torch.arange(6.0).view(2, 3)
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    else:
        tensor.requires_grad_(requires_grad)
    flags = INLINE | WHOLE | REQUIRES_GRAD * requires_grad | PARAMETER * is_parameter
    for _ in range(2):  # the second time from the cache
        head, memory = inline_row(tensor)
        assert head == row(DTYPE_NUMBERS[torch.float32], DENSE, flags, 0, (2, 3))
        tensor.data[1, 2] = 7.0
        assert bytes(memory) == tensor.detach().numpy().tobytes()


def test_an_empty_tensor_is_its_head_alone():
    assert len(inline_row(torch.ones(0, 3))) == 1


def test_other_objects_have_no_row():
    attributed = torch.ones(2)
    attributed.label = "a"
    complex_ones = torch.ones(2, dtype=torch.complex64)
    for obj in (
        [1.0],
        torch.ones(2, 3).t(),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        attributed,
        complex_ones.conj(),
        complex_ones.conj().imag,
        torch.ones(INLINE_BYTES // 4 + 1),
    ):
        assert inline_row(obj) is None, obj
    assert inline_row(complex_ones) and inline_row(torch.ones(INLINE_BYTES // 4))


def test_a_table_has_all_rows_or_none():
    one, other = torch.ones(2), torch.zeros(3)
    table = inline_table([one, other])
    assert table[0] == COUNTS.pack(2, 0) and len(table) == 5
    assert inline_table([one])[0] == COUNTS.pack(1, 0)
    assert inline_table([one, torch.ones(2, 3).t()]) is None
    assert inline_table([one, one[:1]]) is None  # views of one memory stay so


def test_a_full_cache_is_cleared(monkeypatch):
    monkeypatch.setattr(inline_rows, "_heads", {})
    monkeypatch.setattr(inline_rows, "_MAX_HEADS", 3)
    for size in range(1, 6):
        assert inline_row(torch.ones(size))
        assert len(inline_rows._heads) <= 3
