"""Objects to bytes and back, and bytes that are no frame."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm import frame
from mpidist.errors import FrameError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain)
def test_round_trip(obj):
    assert frame.from_bytes(frame.to_bytes(obj)) == obj


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
def test_tensors(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    back = frame.from_bytes(frame.to_bytes({"t": tensor}))["t"]
    assert back.dtype is dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_large_memory_is_not_copied_to_encode():
    tensor = torch.arange(10_000.0)
    array = np.arange(10_000)
    _, body = frame.encode([tensor, array])
    parts = {part.nbytes: part for part in body[1:]}
    assert set(parts) == {tensor.nbytes, array.nbytes}
    tensor[0] = 42.0
    assert parts[tensor.nbytes][:4] == struct.pack("<f", 42.0)


def test_views_share_and_the_senders_tensor_can_still_be_resized():
    base = torch.arange(20_000.0)
    whole, half = frame.from_bytes(frame.to_bytes([base, base[:10_000]]))
    half.zero_()
    assert whole[:10_000].count_nonzero() == 0 and whole[-1] == 19_999
    base.resize_(50_000)


def test_requires_grad_views_and_attributes_survive():
    leaf = torch.ones(4, requires_grad=True)
    view = torch.arange(12.0).view(3, 4).t()
    tagged = torch.ones(2)
    tagged.label = "mine"
    a, b, c = frame.from_bytes(frame.to_bytes([leaf, view, tagged]))
    assert a.requires_grad and torch.equal(b, view) and c.label == "mine"


def test_parameters_and_modules_go_through():
    module = torch.nn.Linear(3, 2)
    back = frame.from_bytes(frame.to_bytes(module))
    assert isinstance(back.weight, torch.nn.Parameter) and torch.equal(back.weight, module.weight)


def test_received_tensors_may_be_written():
    back = frame.from_bytes(frame.to_bytes(torch.zeros(3)))
    back += 1
    assert back.tolist() == [1, 1, 1]


def test_every_truncation_is_refused():
    data = bytes(frame.to_bytes({"a": torch.arange(5), "b": "text"}))
    for length in range(len(data)):
        with pytest.raises(FrameError):
            frame.from_bytes(data[:length])
    with pytest.raises(FrameError, match="announces"):
        frame.from_bytes(data + b"x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"HTTP/1.1 200 OK\r\n\r\n      ", "not a frame"),
        (struct.pack("<4sHHQQ", b"MPIF", 99, 0, 0, 0), "version 99"),
        (struct.pack("<4sHHQQ", b"MPIF", 2, 0, 1 << 40, 0), "buffers"),
    ],
)
def test_foreign_bytes_are_refused(data, words):
    with pytest.raises(FrameError, match=words):
        frame.from_bytes(data)


def test_a_damaged_pickle_is_a_frame_error():
    data = frame.to_bytes([1, 2, 3])
    data[-1] ^= 0xFF
    with pytest.raises(FrameError, match="damaged"):
        frame.from_bytes(data)
