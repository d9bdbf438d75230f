"""Objects go to bytes and come back: values, strides, sharing, references; and what cannot is told."""

from __future__ import annotations

import collections
import itertools
import pickle

import numpy as np
import pytest
import torch

from mpidist.errors import FrameError
from mpidist.rpc import codec, tensor_table
from mpidist.rpc.message import Content, Header
from tests.rpc.test_message import carried

Pair = collections.namedtuple("Pair", "left right")
DTYPES = [dtype for dtype in tensor_table.DTYPES if dtype is not None]


class Marked(codec.Reference):
    """A reference that notes what becomes of it."""

    def __init__(self, number):
        self.number = number

    def fork(self, to):
        return self.number, 100 + self.number, to


def over(obj, forgotten=None, **options):
    """Send an object through the codec and the message format."""
    forgotten = [] if forgotten is None else forgotten
    content = codec.Encoding(obj, options.pop("needs_tensors", False)).content(1)
    _, there = carried(Header(1, 1), content)
    return codec.decode(there, lambda *numbers: Marked(numbers[0]), lambda *numbers: forgotten.append(numbers), **options)


def same(left, right):
    left, right = left.detach(), right.detach()
    equal = torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
    return left.dtype == right.dtype and left.shape == right.shape and equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_size(dtype):
    for numel, needs_tensors in itertools.product([0, 1, 7, 3000, 100_000], [False, True]):
        tensor = torch.arange(numel * 16, dtype=torch.uint8)[: numel * dtype.itemsize]
        tensor = (tensor & 1 if dtype is torch.bool else tensor).view(dtype)
        there = over([tensor, {"again": tensor}], needs_tensors=needs_tensors)
        assert same(there[0], tensor) and there[1]["again"] is there[0], f"{numel}, {needs_tensors}"
        if numel:
            there[0].view(torch.uint8)[0] = 1  # it owns memory that it may write


@pytest.mark.parametrize("needs_tensors", [False, True])
def test_shapes_strides_and_flags(needs_tensors):
    base = torch.randn(6, 8)
    wide = torch.randn(2000, 40)
    cases = [base, base.t(), base[:, 2:5], base[0, 0], base.expand(3, 6, 8), torch.zeros(0, 3), wide[:, 0], wide.t(), wide[::2]]
    for case in cases:
        there = over(case, needs_tensors=needs_tensors)
        assert same(there, case)
        if case is not cases[6]:
            assert there.stride() == case.stride()
    scattered = over(wide[:, 0], needs_tensors=needs_tensors)
    assert scattered.untyped_storage().nbytes() < wide.nbytes / 10  # what lies between did not travel
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        there = over(tensor, needs_tensors=needs_tensors)
        assert there.requires_grad and there.is_leaf and same(there, tensor)
    odd = torch.ones(3)
    odd.note = "kept"
    assert over(odd).note == "kept"
    weight = over(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert type(weight) is torch.nn.Parameter and not weight.requires_grad
    complex_ = torch.randn(5, dtype=torch.complex64)
    assert same(over(complex_.conj()), complex_.conj().resolve_conj()) and same(
        over(complex_.conj().imag), complex_.conj().imag.clone()
    )


@pytest.mark.parametrize("rows", [4, 40_000])
def test_views_keep_sharing_within_a_message(rows):
    base = torch.arange(rows * 6.0).view(rows, 6)
    left, right, whole = over([base[: rows // 2], base[rows // 2 :], base])
    left.zero_()
    right.fill_(1)
    assert torch.equal(whole, torch.cat([torch.zeros(rows // 2, 6), torch.ones(rows - rows // 2, 6)]))
    flat, as_ints = over([base, base.view(torch.int32)])
    flat.zero_()
    assert as_ints.count_nonzero() == 0


def test_far_apart_views_do_not_bring_what_lies_between():
    base = torch.arange(1_000_000.0)
    content = codec.Encoding([base[:10], base[-10:]], needs_tensors=True).content(1)
    assert sum(len(part) for part in content.parts) == 80
    first, last = over([base[:10], base[-10:]])
    assert torch.equal(first, base[:10]) and torch.equal(last, base[-10:])


def test_sparse_and_quantized():
    coo = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3))
    for tensor in (
        coo,
        coo.coalesce(),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
    ):
        there = over(tensor)
        assert there.layout == tensor.layout and torch.equal(there.to_dense(), tensor.to_dense())
        assert tensor.layout is not torch.sparse_coo or there.is_coalesced() == tensor.is_coalesced()
    plain = torch.quantize_per_tensor(torch.randn(8), 0.1, 3, torch.qint8)
    channels = torch.quantize_per_channel(torch.randn(2, 8), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8)
    for tensor in (plain, channels):
        there = over(tensor)
        assert torch.equal(there.dequantize(), tensor.dequantize()) and there.qscheme() == tensor.qscheme()


def test_objects_arrays_and_modules():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    there = over({"pair": Pair(1, [torch.ones(2)]), "model": model, "array": np.arange(50_000), "few": np.ones(3), "none": None})
    assert there["pair"].left == 1 and (there["array"] == np.arange(50_000)).all() and there["none"] is None
    there["few"][0] = 2
    assert all(torch.equal(left, right) for left, right in zip(there["model"].parameters(), model.parameters(), strict=True))
    scripted = over(torch.jit.script(torch.nn.Linear(2, 2)))
    assert scripted(torch.ones(2)).shape == (2,)


def test_large_memory_is_not_copied():
    large = torch.zeros(100_000)
    content = codec.Encoding(large).content(1)
    large[5] = 7
    (part,) = content.parts
    assert part.data_ptr() == large.data_ptr() and part.view(torch.float32)[5] == 7


def test_functions_without_a_name_need_cloudpickle():
    pytest.importorskip("cloudpickle")
    step = 3
    shared = torch.ones(3)
    function, first, second = over([lambda x: x + step, shared, shared])
    assert function(4) == 7 and first is second


def test_what_cannot_be_pickled_raises_and_the_next_object_is_whole():
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("not this one")

    with pytest.raises(RuntimeError, match="not this one"):
        codec.Encoding([torch.ones(3), Marked(1), Stubborn()])
    assert over([1, torch.ones(2)])[0] == 1


class Nested:
    """Encodes another object while it is encoded, as a call within ``__reduce__`` does."""

    def __reduce__(self):
        inside = codec.Encoding([torch.zeros(3), "inner"])
        return bytes, (inside.pickled,)


def test_encoding_within_encoding():
    there = over([torch.ones(2), Nested(), torch.ones(3)])
    assert there[0].shape == (2,) and pickle.loads(there[1])[1] == "inner" and there[2].shape == (3,)


def test_references_are_made_once_and_the_others_forgotten():
    forgotten = []
    reference = Marked(5)
    there = over([reference, [reference], Marked(6)], forgotten)
    assert there[0].number == 5 and there[1][0].number == 5 and there[2].number == 6 and forgotten == []
    content = codec.Encoding([Marked(7), Unreadable()]).content(1)
    assert tensor_table.references_in(content) == [(7, 107, 1)]
    with pytest.raises(ValueError, match="unreadable"):
        codec.decode(content, lambda *numbers: Marked(numbers[0]), lambda *numbers: forgotten.append(numbers))
    content = codec.Encoding([Unreadable(), Marked(8)]).content(1)
    with pytest.raises(ValueError, match="unreadable"):
        codec.decode(content, lambda *numbers: Marked(numbers[0]), lambda *numbers: forgotten.append(numbers))
    assert forgotten == [(8, 108, 1)]


class Unreadable:
    def __reduce__(self):
        return unreadable, ()


def unreadable():
    raise ValueError("unreadable")


def test_attached_tensors_take_the_places_of_those_that_came():
    doubled = over([torch.ones(2), {"x": torch.ones(3)}], needs_tensors=True, attach=lambda tensors: [t * 2 for t in tensors])
    assert doubled[0].sum() == 4 and doubled[1]["x"].sum() == 6


def test_damaged_tables_are_refused():
    content = codec.Encoding([torch.randn(100_000), torch.ones(3)], needs_tensors=True).content(1)
    for length in range(1, len(content.table)):
        with pytest.raises((FrameError, IndexError)):
            codec.decode(Content(content.pickled, content.table[:length], content.parts), None, None)
    with pytest.raises(FrameError):
        codec.decode(Content(content.pickled, content.table, content.parts[:1]), None, None)
    with pytest.raises(FrameError):
        codec.decode(Content(content.pickled, content.table, [memoryview(b"short"), memoryview(b"x")]), None, None)
