"""Table of the store: torch's results, and requests and replies that are refused."""

import struct

import pytest
import torch.distributed as dist

from mpidist.comm.serialization import frame
from mpidist.comm.store import key_value_table
from mpidist.comm.store.key_value_table import KeyValueTable
from mpidist.errors import FrameError, NotPlainData
from tests.tools.support import EndsProcess


def test_operations_of_the_table_return_what_torchs_store_returns():
    ours, theirs = KeyValueTable(), dist.HashStore()
    ours.set("a", b"1")
    theirs.set("a", "1")
    for key, expected, desired in (
        ("a", "0", "9"),
        ("a", "1", "2"),
        ("new", "", "first"),
        ("missing", "x", "y"),
    ):
        mine = ours.compare_set(key, expected.encode(), desired.encode())
        assert mine == theirs.compare_set(key, expected, desired)
    assert ours.add("n", 5) == theirs.add("n", 5)
    assert ours.add("n", -2) == theirs.add("n", -2) == 3
    assert ours.read("n") == theirs.get("n")
    ours.set("empty", b"")
    theirs.set("empty", "")
    assert ours.add("empty", 4) == theirs.add("empty", 4) == 4
    assert ours.has(["a", "n"]) and not ours.has(["a", "zzz"])
    assert ours.delete("a") and not ours.delete("a")
    assert ours.count() == 3


NUMBER = 7


def written(*items):
    return bytes(frame.to_bytes(list(items), data_only=True))


FOREIGN = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1",
    "a pickle": bytes(frame.to_bytes((NUMBER, "read", (EndsProcess(),)))),
    "a pickle under the number of data": bytes(frame.to_bytes(EndsProcess())).replace(
        b"\x03\0\0\0", b"\x03\0\1\0", 1
    ),
    "an unknown verb": written(NUMBER, "__init__", []),
    "a verb that is no text": written(NUMBER, 3, []),
    "a number beyond": written(1 << 63, "count", []),
    "a number below 0": written(-1, "count", []),
    "a number that is none": written("16", "count", []),
    "too few arguments": written(NUMBER, "set", ["a"]),
    "too many": written(NUMBER, "count", [1]),
    "a value that is no bytes": written(NUMBER, "set", ["a", "text"]),
    "a key that is no text": written(NUMBER, "set", [b"a", b"b"]),
    "an amount past 64 bits": written(NUMBER, "add", ["a", 1 << 63]),
    "a true amount": written(NUMBER, "add", ["a", True]),
    "keys that are none": written(NUMBER, "wait", [[1], 1.0]),
    "an endless wait": written(NUMBER, "wait", [["a"], float("inf")]),
    "a wait of no number": written(NUMBER, "wait", [["a"], float("nan")]),
    "no list": written(NUMBER, "count", []).replace(b"\x93", b"\xc0"),
    "no three": written(NUMBER, "count"),
    "a length of 2**40": struct.pack("<4sHHQQ", b"MPIF", 3, 1, 0, 1 << 40),
    "2**20 buffers": struct.pack("<4sHHQQ", b"MPIF", 3, 1, 1 << 20, 0),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_invalid_request_is_refused(name):
    with pytest.raises(FrameError):
        key_value_table.request_of(FOREIGN[name])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        written(1),
        written(1, 2),
        written("1", 2, None),
        written(1, 2, 3),
        bytes(frame.to_bytes([1, EndsProcess(), None])),
    ],
)
def test_an_invalid_reply_is_refused(data):
    with pytest.raises(FrameError):
        key_value_table.reply_of(data)


def test_a_reply_of_other_than_data_is_refused_where_it_is_made():
    data = bytearray(key_value_table.reply(3, [b"1", 2]))
    assert key_value_table.reply_of(data) == (3, [b"1", 2], None)
    with pytest.raises(NotPlainData):
        key_value_table.reply(3, object())
