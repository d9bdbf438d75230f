"""Tensor tables and their parts: valid, damaged, and rows of random forms, sizes and numbers.

A case is contiguous bytes, so that it can be mutated, printed and read again::

    table bytes u32 | table | parts n u8 | n × bytes u32 | the parts, end to end
"""

from __future__ import annotations

import contextlib
import struct
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mpidist.comm.serialization import tensor_rebuild, tensor_table
from mpidist.comm.serialization.tensor_format import COUNTS, FIRST, ROW
from mpidist.errors import FrameError

_READ = 1 << 20  # elements up to which a result is read completely


def packed(table: bytes, parts: list[Any]) -> bytes:
    """Return a case."""
    parts = [bytes(part) for part in parts][:255]
    lengths = struct.pack(f"<B{len(parts)}I", len(parts), *map(len, parts))
    return struct.pack("<I", len(table)) + table + lengths + b"".join(parts)


def unpacked(case: bytes) -> tuple[bytearray, list[memoryview]]:
    """Return the table and the parts of a case; of a damaged case the bytes that exist."""
    length = int.from_bytes(case[:4], "little")
    table, rest = bytearray(case[4 : 4 + length]), case[4 + length :]
    count = rest[0] if rest else 0
    data, parts = rest[1 + 4 * count :], []
    for place in range(count):
        size = int.from_bytes(rest[1 + 4 * place : 5 + 4 * place], "little")
        parts.append(memoryview(bytearray(data[:size])))
        data = data[size:]
    return table, parts


def described(objects: list[Any], is_dense: bool = True) -> tuple[bytes, list[memoryview]]:
    """Return the table and the memory of objects as they arrive."""
    assert all(map(tensor_table.is_describable, objects))
    table, parts, devices = tensor_table.describe(objects, is_dense=is_dense)
    assert devices == [None] * len(parts)
    return table, [_memory(part) for part in parts]


def _memory(part: Any) -> memoryview:
    """Return a part as the transport delivers it: memory of its own."""
    is_tensor = isinstance(part, torch.Tensor)
    data = part.detach().view(-1).view(torch.uint8).numpy().tobytes() if is_tensor else bytes(part)
    return memoryview(bytearray(data))


def objects() -> dict[str, list[Any]]:
    """Return objects of every form, by name; small, so that mutations often hit a field."""
    base, wide = torch.arange(24.0).view(4, 6), torch.ones(9000)
    coo = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "small": [torch.ones(3)],
            "none": [torch.ones(0, 3), torch.ones(2)],
            "bools": [torch.tensor([True, False, True])],
            "half": [torch.ones(2, 2, dtype=torch.float16), torch.tensor(1 + 2j), torch.tensor(5)],
            "leaf": [torch.nn.Parameter(torch.ones(2)), torch.ones(1, requires_grad=True)],
            "part": [wide],
            "bools in a part": [torch.ones(40_000, dtype=torch.bool)],
            "views": [base[:, 1:], base.t(), base[1], base.view(torch.int32)],
            "views of bools": [
                torch.tensor([[True, False]] * 3).t(),
                torch.zeros(4, 4, dtype=torch.bool)[:, 1:],
            ],
            "expanded": [base[0].expand(5, 6)],
            "coo": [coo],
            "coalesced": [coo.coalesce(), torch.ones(2)],
            "hybrid": [torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 5), (3, 5))],
            "arrays": [
                np.arange(6.0).reshape(2, 3),
                np.array([True, False]),
                np.ones((), np.int16),
                np.ones((0, 2)),
            ],
            "bytes": [bytearray(b"abcdef"), bytearray()],
        }


def samples() -> list[bytes]:
    """Return valid cases of each form, and of all forms together."""
    made = objects()
    return [
        packed(*described(one))
        for one in (*made.values(), [obj for one in made.values() for obj in one])
    ]


_sizes = st.sampled_from([0, 1, 2, 3, 4, 8]) | st.integers(-3, 70) | st.sampled_from(
    [1 << 31, (1 << 32) - 1, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1, -1, -(1 << 63)]
)  # fmt: skip


@st.composite
def rows(draw: Any) -> bytes:
    """Draw a row and its elements or strides; most numbers are close to valid ones."""
    shape = draw(st.lists(_sizes, max_size=3) | st.lists(_sizes, max_size=12))
    form, flags = draw(st.integers(0, 5)), draw(st.integers(0, 31) | st.integers(0, 255))
    row = ROW.pack(
        draw(st.integers(0, 22)),
        form,
        flags,
        len(shape),
        draw(st.integers(0, 3) | st.just(2**32 - 1)),
    )
    row += struct.pack(f"<{len(shape)}q", *shape)
    follows = draw(st.sampled_from(["elements", "strides", "nothing"]))
    if follows == "elements":
        return row + draw(st.binary(max_size=64))
    if follows == "strides":
        strides = draw(st.lists(_sizes, min_size=len(shape), max_size=len(shape)))
        return row + struct.pack(f"<{1 + len(strides)}q", draw(_sizes), *strides)
    return row


@st.composite
def cases(draw: Any, valid: tuple[bytes, ...] = ()) -> bytes:
    """Draw a case: a damaged sample, or random rows over random parts."""
    if draw(st.booleans()):
        case = bytearray(draw(st.sampled_from(valid or tuple(samples()))))
        for _ in range(draw(st.integers(1, 4))):
            # Most numbers of a table have eight bytes, and its rows are at its beginning.
            place = draw(st.integers(0, min(len(case), 400)) | st.integers(0, len(case)))
            change = draw(
                st.binary(min_size=1, max_size=4) | _sizes.map(lambda size: struct.pack("<q", size))
            )
            end = place + len(change) if draw(st.booleans()) else place + draw(st.integers(0, 8))
            case[place:end] = change
        return bytes(case)
    body = draw(st.lists(rows(), max_size=5))
    count = draw(st.just(len(body)) | st.integers(0, 2**32 - 1))
    parts = draw(st.lists(st.binary(max_size=80), max_size=4))
    return packed(
        COUNTS.pack(count, draw(st.just(len(parts)) | st.integers(0, 5))) + b"".join(body), parts
    )


def check(case: bytes) -> bool:
    """Read a case by both readers: ``FrameError``, or objects that can be used.

    Returns:
        Whether a strict reader accepted the case.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for is_strict in (False, True):
            table, parts = unpacked(case)
            try:
                found, used, end = tensor_rebuild.read(table, 0, parts, is_strict=is_strict)
            except FrameError:
                if is_strict:
                    return False
                continue
            assert used <= len(parts) and end <= len(table)
            for obj in found:
                _require_inside(obj)
                if is_strict:
                    _use(obj)
            if is_strict:
                assert len(found) <= len(table) // ROW.size
                assert sum(map(_bytes_of, _storages(found))) <= len(case)
        table, parts = unpacked(case)
        lone = tensor_rebuild.read_lone(table, 0)
        if lone is not None:
            assert lone[0].dtype is not torch.bool and lone[1] <= len(table)
            assert len(table) >= FIRST.size and lone[0].untyped_storage().nbytes() <= len(table)
            _use(lone[0])
    return True


def _inner(obj: Any) -> list[Any]:
    """Return the dense tensors and arrays of an object."""
    if not isinstance(obj, torch.Tensor):
        return [obj]
    obj = obj.detach()
    if obj.layout is torch.sparse_coo:
        return [obj._indices(), obj._values()]
    return [obj]


def _require_inside(obj: Any) -> None:
    """Require that elements are within their storage; only numbers are compared."""
    for one in _inner(obj):
        if isinstance(one, torch.Tensor) and one.numel():
            reach = sum(
                (size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True)
            )
            assert min(one.stride(), default=0) >= 0 and one.storage_offset() >= 0
            assert (
                one.storage_offset() + reach + 1
            ) * one.element_size() <= one.untyped_storage().nbytes()


def _storages(found: list[Any]) -> list[Any]:
    """Return the memory of objects, each once."""
    pieces = [one for obj in found for one in _inner(obj)]
    storages = {
        one.untyped_storage().data_ptr(): one for one in pieces if isinstance(one, torch.Tensor)
    }
    return [*storages.values(), *(one for one in pieces if not isinstance(one, torch.Tensor))]


def _bytes_of(one: Any) -> int:
    if isinstance(one, torch.Tensor):
        assert one.numel() * one.element_size() <= one.untyped_storage().nbytes()
        return one.untyped_storage().nbytes()
    return len(one) if isinstance(one, bytearray) else one.nbytes


def _use(obj: Any) -> None:
    """Read an object completely; torch may lack a kernel or raise an exception."""
    if isinstance(obj, bytearray):
        return
    if isinstance(obj, np.ndarray):
        repr(obj)
        with contextlib.suppress(ValueError, TypeError):
            obj.sum()
        assert obj.dtype != bool or obj.size == 0 or obj.view(np.uint8).max() <= 1
        return
    obj = obj.detach()
    for one in _inner(obj):
        if one.dtype is torch.bool and one.numel():
            assert one.contiguous().view(torch.uint8).max() <= 1
    uses: list[Any] = [
        repr,
        torch.Tensor.sum,
        torch.Tensor.clone,
        torch.Tensor.nonzero if obj.dtype is torch.bool else torch.isnan,
    ]
    if obj.layout is not torch.strided:
        uses += [torch.Tensor.to_dense] if _sized(obj) <= _READ else []
        uses += [torch.Tensor.coalesce]
    for use in uses:
        with contextlib.suppress(RuntimeError, TypeError, IndexError, ValueError):
            use(obj)


def _sized(obj: Any) -> int:
    return int(np.prod([size or 1 for size in obj.shape], dtype=object)) if obj.dim() else 1
