"""Rebuilding of a table's objects: the cached form of one small tensor, and damaged tables."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.serialization import tensor_rebuild
from mpidist.comm.serialization.tensor_format import DTYPE_NUMBERS, INLINE, WHOLE
from mpidist.errors import FrameError
from tests.bytes_fuzz.tables import described
from tests.comm.serialization import forged_tables


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setattr(tensor_rebuild, "_lone", {})


def table_of(*objects):
    table, parts = described(list(objects))
    return bytearray(table), parts


@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_a_lone_small_tensor_is_read_from_the_cache_the_second_time(shape):
    tensor = torch.rand(shape)
    table, _ = table_of(tensor)
    framed = bytearray(b"ahead") + table + b"behind"
    assert tensor_rebuild.read_lone(framed, 5) is None  # new
    ((first,), used, end) = tensor_rebuild.read(framed, 5, [])
    assert torch.equal(first, tensor) and (used, end) == (0, 5 + len(table))
    second, end = tensor_rebuild.read_lone(framed, 5)
    assert torch.equal(second, tensor) and end == 5 + len(table)
    second.zero_()  # it owns its memory
    assert torch.equal(tensor_rebuild.read_lone(framed, 5)[0], tensor)
    for cut in (framed[: end - 1], framed[:9], framed[:5]):
        assert tensor_rebuild.read_lone(cut, 5) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True]),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(0),
        torch.ones(50_000),
    ],
    ids=["bool", "grad", "parameter", "empty", "large"],
)
def test_other_tensors_are_not_cached(tensor):
    table, parts = table_of(tensor)
    (found,), _, _ = tensor_rebuild.read(table, 0, parts)
    assert torch.equal(found, tensor) and found.requires_grad is tensor.requires_grad
    assert type(found) is type(tensor) and tensor_rebuild.read_lone(table, 0) is None


def test_a_full_cache_is_cleared(monkeypatch):
    monkeypatch.setattr(tensor_rebuild, "_MAX_LONE", 3)
    for size in range(1, 6):
        tensor_rebuild.read(table_of(torch.ones(size))[0], 0, [])
        assert len(tensor_rebuild._lone) <= 3


def test_a_table_uses_its_own_parts_alone():
    large = torch.rand(50_000)
    table, parts = table_of(torch.ones(2), large)
    found, used, end = tensor_rebuild.read(table, 0, [*parts, memoryview(b"other")])
    assert torch.equal(found[1], large) and (used, end) == (2, len(table))
    with pytest.raises(FrameError, match="2 parts announced, 0 arrived"):
        tensor_rebuild.read(table, 0, [])


def test_a_bool_is_checked_for_a_strict_reader():
    rows = [
        forged_tables.row(
            DTYPE_NUMBERS[torch.bool], forged_tables.DENSE, INLINE | WHOLE, 0, (1,), b"\2"
        )
    ]
    assert len(forged_tables.read(rows)) == 1
    with pytest.raises(FrameError):
        forged_tables.read(rows, is_strict=True)


@pytest.mark.parametrize("objects", [[torch.ones(3)], [torch.ones(2), torch.ones(2, 2)]])
def test_a_table_that_is_cut_off_is_an_error(objects):
    table, parts = table_of(*objects)
    for end in range(len(table)):
        with pytest.raises(FrameError):
            tensor_rebuild.read(table[:end], 0, parts)
