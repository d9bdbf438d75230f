"""Tensors and arrays as rows of a table and parts: round trips, and refusal of truncated tables."""

from __future__ import annotations

import functools
import itertools
import sys

import numpy as np
import pytest
import torch

from mpidist.comm.serialization import frame, tensor_pickle, tensor_rebuild, tensor_table
from mpidist.comm.serialization.inline_rows import INLINE_BYTES
from mpidist.comm.serialization.tensor_format import ARRAY_DTYPES, COUNTS, DTYPES
from mpidist.errors import FrameError, NotPlainData
from tests.bytes_fuzz import tables

KNOWN = [dtype for dtype in DTYPES if dtype is not None]


described = functools.partial(tables.described, is_dense=False)


def over(*objects):
    """Return rebuilt objects from a table inside other bytes, with further parts behind its own."""
    table, parts = described(objects)
    there, used, end = tensor_rebuild.read(
        bytearray(b"ahead" + table + b"behind"), 5, [*parts, memoryview(b"other")]
    )
    assert used == len(parts) and end == 5 + len(table) and len(there) == len(objects)
    return there


def same(left, right):
    left, right = left.detach(), right.detach()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (left, right)))


@pytest.mark.parametrize("dtype", KNOWN, ids=str)
def test_every_dtype_and_size(dtype):
    inline = INLINE_BYTES // dtype.itemsize
    for numel in (0, 1, 7, inline, inline + 1, 100_000):
        data = torch.arange(numel * dtype.itemsize).to(torch.uint8)
        tensor = (data & 1 if dtype is torch.bool else data).view(dtype)
        for objects in ([tensor], [tensor, tensor.clone()]):
            for there in over(*objects):
                assert same(there, tensor), numel
                if numel:
                    there.view(torch.uint8)[0] = 1  # it owns writable memory


@pytest.mark.parametrize("dtype", [dtype for dtype in ARRAY_DTYPES if dtype is not None], ids=str)
def test_arrays_of_every_dtype(dtype):
    for shape in ((), (0,), (3,), (2, 0, 3), (4, 5), (3, 2000)):
        array = (
            np.arange(np.prod(shape, dtype=int) * dtype.itemsize).astype(np.uint8).view(dtype)
            if shape
            else np.ones((), dtype)
        )
        array = array.astype(dtype).reshape(shape)
        (there,) = over(array)
        assert type(there) is np.ndarray and there.dtype == dtype and there.shape == shape
        assert there.tobytes() == array.tobytes() and there.flags.writeable


def test_bytearrays():
    one, two, none = over(bytearray(b"abc"), bytearray(100_000), bytearray())
    assert (one, two, none) == (b"abc", bytes(100_000), b"") and type(one) is type(two) is type(
        none
    ) is bytearray


def test_what_is_no_row():
    class Own(torch.Tensor):
        """A subclass, whose methods a row would lose."""

    odd = torch.ones(2)
    odd.note = 1
    objects = [
        *(
            1,
            b"bytes",
            memoryview(b"m"),
            [1],
            odd,
            torch.ones(2).as_subclass(Own),
            torch.ones(2, device="meta"),
        ),
        *(
            torch.nested.nested_tensor([torch.ones(1)]),
            np.float64(1),
            np.ones((2, 3)).T,
            np.ones(2, dtype=">f4"),
        ),
        *(
            np.array([None]),
            np.ones(2, "M8[s]"),
            torch.nn.Buffer(torch.ones(1)),
            np.ones(2).view(np.recarray),
        ),
    ]
    for obj in objects:
        assert not tensor_table.is_describable(obj), type(obj)


base = torch.randn(6, 8)
wide = torch.randn(2000, 40)
STRIDED = {
    "whole": base,
    "turned": base.t(),
    "columns": base[:, 2:5],
    "element": base[0, 0],
    "no elements": torch.zeros(0, 3),
    "no elements, strided": torch.zeros(3, 0).t(),
    "large turned": wide.t(),
    "every other row": wide[::2],
    "many dimensions": torch.arange(512.0).view([2] * 9),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "storage offset": torch.arange(100_000.0)[50_000:],
}


@pytest.mark.parametrize("case", STRIDED)
def test_strides_are_kept(case):
    for there in (*over(STRIDED[case]), over(torch.ones(1), STRIDED[case])[1]):
        assert same(there, STRIDED[case])
        assert there.stride() == STRIDED[case].stride() or not there.numel()


def test_expanded_and_scattered_tensors_do_not_bring_more_than_their_elements():
    expanded, scattered = base[0].expand(300, 8), wide[:, 0]
    assert all(
        same(*pair) for pair in zip(over(expanded, scattered), (expanded, scattered), strict=True)
    )
    for tensor, most in ((expanded, expanded.nbytes), (scattered, scattered.nbytes)):
        table, parts = described([tensor])
        assert len(table) + sum(part.nbytes for part in parts) <= most + 100
        (there,) = over(tensor)
        assert there.untyped_storage().nbytes() <= most


def test_small_tensors_do_not_keep_their_message():
    there = over(*(torch.full((3,), float(number)) for number in range(100)))
    assert all(tensor.untyped_storage().nbytes() == 12 for tensor in there)
    assert [tensor[0].item() for tensor in there] == list(range(100))


def test_conjugates_and_negatives_arrive_resolved():
    number = torch.randn(5, dtype=torch.complex64)
    for tensor in (
        number.conj(),
        number.conj().imag,
        torch.randn(5000, dtype=torch.complex64).conj(),
    ):
        (there,) = over(tensor)
        assert not there.is_conj() and not there.is_neg()
        assert same(there, tensor.resolve_conj().resolve_neg())


FLAGS = [(numel, layout) for numel in (3, 5000) for layout in ("dense", "strided", "sparse")]


@pytest.mark.parametrize(("numel", "layout"), FLAGS)
def test_gradients_and_parameters(numel, layout):
    data = torch.ones(2 * numel)[::2] if layout == "strided" else torch.ones(numel)
    data = data.to_sparse() if layout == "sparse" else data
    leaf = data.clone().requires_grad_()
    cases = [
        data,
        leaf,
        leaf * 1,
        torch.nn.Parameter(data),
        torch.nn.Parameter(data, requires_grad=False),
    ]
    for there, case in zip([over(case)[0] for case in cases], cases, strict=True):
        assert (
            type(there) is type(case)
            and there.requires_grad == case.requires_grad
            and there.is_leaf
        )
        assert torch.equal(there.detach().to_dense(), torch.ones(numel))


SPARSE = {
    "coo": torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3)),
    "coo, not coalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [3.0, 4.0], (2, 3)),
    "coo, coalesced": torch.eye(4).to_sparse_coo().coalesce(),
    "coo, dense dimensions": torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 5), (3, 5)),
    "coo, empty": torch.sparse_coo_tensor(size=(3, 4)),
    "large": torch.eye(3000).to_sparse(),
}


@pytest.mark.parametrize("case", SPARSE)
@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors(case):
    tensor = SPARSE[case]
    for there in over(tensor, torch.ones(2), tensor)[::2]:
        assert (
            there.layout == tensor.layout
            and there.shape == tensor.shape
            and there.dtype == tensor.dtype
        )
        assert torch.equal(there.to_dense(), tensor.to_dense())
        assert there.is_coalesced() == tensor.is_coalesced()


REFUSED = {
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr cannot be sent.*to_sparse_coo"),
    "csc": (lambda: torch.eye(4).to_sparse_csc(), "sparse_csc cannot be sent.*to_dense"),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "sparse_bsr cannot be sent"),
    "bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), "sparse_bsc cannot be sent"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 3, torch.qint8),
        r"quantized tensor \(torch.qint8\) cannot be sent.*dequantize",
    ),
    "by channels": (
        lambda: torch.quantize_per_channel(
            torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2
        ),
        "quantized tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_other_layouts_are_refused_by_the_sender(case):
    make, reason = REFUSED[case]
    tensor = make()
    assert not tensor_table.is_describable(tensor)
    attributed = make()
    attributed.of = "a user"
    for obj in (tensor, attributed, [torch.ones(2), {"a": tensor}]):
        with pytest.raises(TypeError, match=reason):
            tensor_pickle.dumps(obj, tensor_pickle.Sink())
        with pytest.raises(TypeError, match=reason):
            frame.encode(obj)
        with pytest.raises(NotPlainData, match=str(tensor.dtype)):
            frame.encode(obj, data_only=True)


def work_of(objects):
    """Return the number of functions called to describe and rebuild objects, and the bytes sent."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    table, parts = described(objects)
    sys.setprofile(note)
    try:
        tensor_table.describe(objects)
        tensor_rebuild.read(table, 0, parts)
    finally:
        sys.setprofile(None)
    return count, len(table) + sum(part.nbytes for part in parts)


MANY = {
    "small": lambda count: [torch.ones(3) for _ in range(count)],
    "large": lambda count: [torch.ones(3000) for _ in range(count)],
    "views of one": lambda count: list(torch.ones(count * 3).split(3)),
    "the same": lambda count: [torch.ones(3)] * count,
    "far apart views": lambda count: list(torch.ones(count, 3000)[:, :3]),
    "sparse": lambda count: [torch.eye(3).to_sparse() for _ in range(count)],
    "arrays": lambda count: [np.ones(3) for _ in range(count)],
}


@pytest.mark.parametrize("kind", MANY)
def test_many_tensors_cost_linear_work_and_memory(kind):
    few, many = work_of(MANY[kind](200)), work_of(MANY[kind](800))
    assert all(larger <= 4.4 * smaller for smaller, larger in zip(few, many, strict=True)), (
        few,
        many,
    )


def test_every_truncation_is_refused():
    base = torch.randn(3000, 4)
    objects = [
        torch.ones(3),
        base[:, 1:],
        base.t(),
        torch.randn(5000),
        torch.eye(3).to_sparse(),
    ]
    objects += [np.arange(4), bytearray(b"abc"), torch.nn.Parameter(torch.ones(2))]
    for chosen in (
        [torch.ones(3)],
        [torch.ones(3), torch.ones(9)],
        *([one] for one in objects[1:]),
        objects,
    ):
        table, parts = described(chosen)
        tensor_rebuild.read(bytearray(table), 0, parts)
        for length in range(len(table)):
            with pytest.raises(FrameError):
                tensor_rebuild.read(bytearray(table[:length]), 0, parts)
        for count in range(len(parts)):
            with pytest.raises(FrameError):
                tensor_rebuild.read(bytearray(table), 0, parts[:count])


def test_parts_that_are_too_short_are_refused():
    base = torch.randn(3000, 4)
    for tensor in (
        base,
        base[:, 1:],
        base.t(),
        torch.eye(3).to_sparse(),
        np.arange(4.0),
        torch.eye(9000, 2).to_sparse(),
    ):
        table, parts = described([tensor])
        for place, part in enumerate(parts):
            for length in {0, 1, 4, part.nbytes - 4, part.nbytes - 1}:
                with pytest.raises(FrameError):
                    tensor_rebuild.read(
                        table,
                        0,
                        [*parts[:place], memoryview(bytearray(part[:length])), *parts[place + 1 :]],
                    )


def test_unknown_numbers_are_refused():
    table, _ = described([torch.ones(3)])
    for place, value in ((COUNTS.size, 200), (COUNTS.size + 1, 99), (COUNTS.size + 3, 255)):
        broken = bytearray(table)
        broken[place] = value
        with pytest.raises(FrameError):
            tensor_rebuild.read(broken, 0, [])
    for rows, used in itertools.product((1, 2, 2**32 - 1), (1, 2**32 - 1)):
        with pytest.raises(FrameError):
            tensor_rebuild.read(COUNTS.pack(rows, used) + table[COUNTS.size :], 0, [])
