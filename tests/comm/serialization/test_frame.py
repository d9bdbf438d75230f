"""Frames: objects to bytes and back, and bytes that are not a frame."""

import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.comm.serialization import frame
from mpidist.errors import FrameError, NotPlainData
from tests.bytes_fuzz import frames

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_round_trip(obj):
    assert frame.from_bytes(frame.to_bytes(obj)) == obj


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.complex64,
    ],
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


def test_parameters_and_modules_arrive():
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
        (struct.pack("<4sHHQQ", b"MPIF", 2, 0, 0, 0), "version 2"),
        (struct.pack("<4sHHQQ", b"MPIF", 3, 7, 0, 0), "unknown format"),
        (struct.pack("<4sHHQQ", b"MPIF", 3, 0, 1 << 40, 0), "buffers"),
        (struct.pack("<4sHHQQQ", b"MPIF", 3, 1, 1, 0, (1 << 64) - 1), "no machine holds"),
        (struct.pack("<4sHHQQI", b"MPIF", 3, 1, 0, 4, 1), "announces a table of 1 bytes"),
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


# --- data alone ---


@given(plain)
def test_data_is_read_with_and_without_data_only(obj):
    data = frame.to_bytes(obj, data_only=True)
    assert frame.from_bytes(data, data_only=True) == obj
    assert frame.from_bytes(data) == obj


def test_tensors_and_arrays_travel_as_data():
    base = torch.arange(20_000.0)
    sent = {
        "base": base,
        "half": base[:10_000],
        "array": np.arange(5000),
        "leaf": torch.ones(2, requires_grad=True),
    }
    back = frame.from_bytes(frame.to_bytes(sent, data_only=True), data_only=True)
    back["half"].zero_()
    assert back["base"][:10_000].count_nonzero() == 0 and back["base"][-1] == 19_999
    assert np.array_equal(back["array"], sent["array"]) and back["leaf"].requires_grad


class Runs:
    """Records that it was unpickled."""

    has_run = False

    def __reduce__(self):
        return setattr, (Runs, "has_run", True)


def test_a_pickle_is_refused_unread_where_data_is_asked_for():
    data = frame.to_bytes([1, Runs()])
    with pytest.raises(FrameError, match=r"a pickle came.*MPIDIST_TRUST=data"):
        frame.from_bytes(data, data_only=True)
    assert not Runs.has_run
    frame.from_bytes(data)
    assert Runs.has_run  # unpickling runs the payload


@pytest.mark.parametrize("number", [frame.DATA, frame.REFUSAL])
def test_a_pickle_under_another_formats_number_is_no_data(number):
    Runs.has_run = False
    data = frame.to_bytes(Runs())
    struct.pack_into("<H", data, 6, number)
    with pytest.raises(FrameError):
        frame.from_bytes(data, data_only=True)
    assert not Runs.has_run


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        ({"a": [0, Runs()]}, r"\['a'\]\[1\]: a .*Runs is no plain data"),
        (print, "print"),
        ([torch.nn.Linear(1, 1)], r"\[0\]: .*Linear"),
    ],
)
def test_what_is_no_data_is_named_with_its_place(obj, words):
    with pytest.raises(NotPlainData, match=words):
        frame.encode(obj, data_only=True)


def test_a_tensor_of_a_device_is_refused_as_data():
    with pytest.raises(NotPlainData):
        frame.encode([torch.ones(2, device="meta")], data_only=True)


def test_a_refusal_raises_in_the_place_of_the_object():
    header, body = frame.refusal("no room")
    with pytest.raises(frame.RefusedError, match="no room"):
        frame.decode(header, body, data_only=True)


def test_buffers_that_no_row_describes_are_refused():
    header, body = frame.encode([1], data_only=True)
    header = struct.pack("<4sHHQQQ", b"MPIF", 3, 1, 1, body[0].nbytes, 3)
    with pytest.raises(FrameError, match="describes 0"):
        frame.from_bytes(header + bytes(body[0]) + b"abc")


@pytest.mark.parametrize("case", frames.samples())
def test_samples_are_read_but_for_pickles_and_refusals(case):
    assert frames.check(case) == (case[6] == frame.DATA)


@settings(max_examples=int(os.environ.get("MPIDIST_FUZZ_CASES", "150")), deadline=None)
@given(frames.cases(tuple(frames.samples())))
def test_any_bytes_are_data_or_a_frame_error(case):
    frames.check(case)
