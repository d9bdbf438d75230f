"""Frames, requests to the store and watchdog messages: valid, damaged, and with random headers."""

from __future__ import annotations

import struct
import warnings
from collections import OrderedDict
from datetime import datetime
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mpidist.comm.execution.op_status import Call, Entry, History
from mpidist.comm.serialization import frame, tensor_pickle
from mpidist.comm.store import key_value_table
from mpidist.comm.watchdog import watchdog_messages
from mpidist.errors import FrameError

_FIXED = struct.Struct("<4sHHQQ")
_KINDS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set,
     frozenset, type(...), torch.Tensor, torch.nn.Parameter,
    np.ndarray, torch.dtype, torch.device, torch.Size,
     OrderedDict, datetime}
)  # fmt: skip


def samples() -> list[bytes]:
    """Return valid frames of all three formats, requests and messages."""
    held = {
        "t": torch.arange(6.0).view(2, 3),
        "a": np.arange(4),
        (1, 2): {3, "x"},
        "d": torch.float16,
        "n": [None, 1 << 70, 2.5j],
    }
    large = [torch.arange(3000.0), np.arange(3000), bytearray(b"x" * 3000)]
    made = [
        frame.to_bytes(obj, data_only=is_data)
        for obj in (held, large, b"", [1, [2, [3]]])
        for is_data in (True, False)
    ]
    header, body = frame.refusal("no room")
    made.append(bytearray().join([header, *body]))
    for tag, verb, args in (
        (16, "set", ("k", b"v")),
        (17, "wait", (["k", "l"], 1.5)),
        (18, "add", ("k", 3)),
        (0, "bye", ()),
    ):
        made.append(bytearray(key_value_table.request(tag, verb, args)))
    made.append(bytearray(key_value_table.reply(1, b"value")))
    entry = Entry("group", "key", 3, "barrier", (2, 3), "float32", 1.5, 0)
    history = History(3, (Call("all_reduce", (2, 3), "float32"), Call("barrier")))
    for kind, content in (
        ("ask", (("key", "x"), 0)),
        ("answer", watchdog_messages.Answer([entry], ("main thread: train.py:5",), history)),
        ("failed", ("key", "text", (1,))),
        ("left", {"key": history}),
    ):
        made.append(bytearray(watchdog_messages.encoded(kind, 1, content)))
    return [bytes(one) for one in made]


_numbers = st.integers(0, 70) | st.sampled_from(
    [1 << 20, (1 << 20) + 1, 1 << 31, 1 << 32, 1 << 50, 1 << 63, (1 << 64) - 1]
)


@st.composite
def cases(draw: Any, valid: tuple[bytes, ...] = ()) -> bytes:
    """Draw a damaged sample, or a header of random numbers before random bytes."""
    if draw(st.integers(0, 3)):
        case = bytearray(draw(st.sampled_from(valid or tuple(samples()))))
        for _ in range(draw(st.integers(1, 4))):
            place = draw(st.integers(0, min(len(case), 120)) | st.integers(0, len(case)))
            change = draw(
                st.binary(min_size=1, max_size=4)
                | _numbers.map(lambda number: struct.pack("<Q", number))
            )
            end = place + len(change) if draw(st.booleans()) else place + draw(st.integers(0, 8))
            case[place:end] = change
        return bytes(case)
    content = draw(st.binary(max_size=100))
    lengths = draw(st.lists(_numbers, max_size=4))
    table = draw(st.just(0) | st.integers(0, 2**32 - 1))
    body = struct.pack("<I", table) + content
    first, count = draw(st.just(len(body)) | _numbers), draw(st.just(len(lengths)) | _numbers)
    header = _FIXED.pack(b"MPIF", 3, draw(st.integers(0, 3)), count, first)
    return header + struct.pack(f"<{len(lengths)}Q", *lengths) + body


def check(case: bytes) -> bool:
    """Read a case as data, request, reply and watchdog message: data, or ``FrameError``.

    Returns:
        Whether it is data.
    """
    loads = tensor_pickle.loads
    tensor_pickle.loads = _forbidden
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read in (
                key_value_table.request_of,
                key_value_table.reply_of,
                watchdog_messages.decoded,
            ):
                try:
                    read(bytearray(case))
                except FrameError:
                    pass
            try:
                found = frame.from_bytes(bytearray(case), data_only=True)
            except FrameError:
                return False
            _require_data(found, 2 * len(case))
            return True
    finally:
        tensor_pickle.loads = loads


def _forbidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pickle was read")


def _require_data(found: Any, most: int) -> None:
    assert type(found) in _KINDS or isinstance(found, np.generic), type(found)
    if isinstance(found, torch.Tensor):
        if found.layout is torch.strided:
            assert found.numel() == 0 or found.untyped_storage().nbytes() <= most
            found.detach().clone()
        else:
            found.to_dense() if found.numel() < 1 << 20 else None
    elif isinstance(found, np.ndarray):
        assert found.nbytes <= most and not found.dtype.hasobject
        found.copy()
    elif isinstance(found, dict):
        for key, value in found.items():
            _require_data(key, most)
            _require_data(value, most)
    elif isinstance(found, (list, tuple, set, frozenset)):
        for value in found:
            _require_data(value, most)
