"""Reader of data: objects of each code, and an error for any other bytes."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
import pytest
import torch

from mpidist.comm.serialization.data_format import (
    DEPTH,
    DEVICE,
    DTYPE,
    ELLIPSIS,
    FIRST_OWN,
    INTEGER,
    NUMBER,
    OBJECT,
    OBJECTS,
    PAIRS,
    RANGE,
    SCALAR,
    SIZE,
    TUPLE,
    TUPLES,
)
from mpidist.comm.serialization.data_reader import loads, loads_plain
from mpidist.comm.serialization.data_writer import dumps
from mpidist.errors import FrameError, MpidistError

Ext, encode = msgspec.msgpack.Ext, msgspec.msgpack.encode


def ext(code, *values):
    return Ext(code, encode(list(values)))


def read(obj, objects=(), extend=None):
    return loads(encode(obj), objects, extend)


def test_objects_are_those_that_came_with_the_data():
    objects = [torch.ones(1), np.ones(2), bytearray(b"c")]
    assert read(Ext(OBJECT, NUMBER.pack(2)), objects) is objects[2]
    found = read([Ext(OBJECTS, RANGE.pack(0, 2)), Ext(OBJECT, NUMBER.pack(0))], objects)
    assert found[0][1] is objects[1] and found[1] is objects[0]
    for marks in (
        Ext(OBJECT, NUMBER.pack(3)),
        Ext(OBJECT, b"\0"),
        Ext(OBJECTS, RANGE.pack(2, 2)),
        Ext(OBJECTS, RANGE.pack(0, 0)),
        Ext(OBJECTS, b""),
        # More items than objects: a short message could grow without bound.
        [Ext(OBJECTS, RANGE.pack(0, 2))] * 2,
    ):
        with pytest.raises(FrameError, match="beyond the 3 that came"):
            read(marks, objects)


def test_each_kind_has_its_type():
    assert read(ext(TUPLE, 1, ext(TUPLE, 2))) == (1, (2,))
    assert read(ext(TUPLES, [1], [])) == [(1,), ()]
    assert read(ext(PAIRS, ext(TUPLE, 1), 2)) == {(1,): 2}
    assert read(Ext(INTEGER, (-5).to_bytes(9, "little", signed=True))) == -5
    assert read(ext(SIZE, 2, 3)) == torch.Size((2, 3)) and read(Ext(ELLIPSIS, b"")) is ...
    assert read(ext(DEVICE, "cuda", 1)) == torch.device("cuda", 1)
    assert read(Ext(DTYPE, b"bfloat16")) is torch.bfloat16
    scalar = read(ext(SCALAR, "float32", np.float32(2.5).tobytes()))
    assert type(scalar) is np.float32 and scalar == 2.5


def nested(depth):
    inner = ext(TUPLE)
    for _ in range(depth - 1):
        inner = ext(TUPLE, inner)
    return inner


@pytest.mark.parametrize(
    "obj",
    [
        ext(TUPLES, 1),
        ext(PAIRS, 1),
        Ext(TUPLE, encode({})),
        ext(SIZE, -1),
        ext(SIZE, True),
        ext(DEVICE, "tpu", None),
        ext(DEVICE, "cuda", 128),
        ext(DEVICE, "cuda", True),
        Ext(ELLIPSIS, b"a"),
        Ext(DTYPE, b"float31"),
        ext(SCALAR, "bool", b"\2"),
        ext(SCALAR, "float32", b"\0"),
        ext(SCALAR, "object", b""),
        Ext(FIRST_OWN, b""),
        Ext(31, b""),
        nested(DEPTH + 1),
    ],
    ids=lambda obj: f"{obj.code}-{bytes(obj.data[:8]).hex()}" if isinstance(obj, Ext) else "deep",
)
def test_other_bytes_are_an_error(obj):
    with pytest.raises(FrameError):
        read(obj)
    for end in range(len(encode(obj))):
        with pytest.raises(FrameError):
            loads(encode(obj)[:end])


def test_the_deepest_data_is_read():
    found, depth = read(nested(DEPTH)), 1
    while found:
        (found,), depth = found, depth + 1
    assert depth == DEPTH


def test_a_callers_kinds_are_made_by_the_caller():
    def extend(code, data, read_items):
        return code, read_items(data)

    assert read(ext(FIRST_OWN, ext(TUPLE, 1)), extend=extend) == (FIRST_OWN, [(1,)])

    def refused(code, data, read_items):
        raise MpidistError("not this one")

    with pytest.raises(MpidistError, match="not this one"):
        read(ext(FIRST_OWN), extend=refused)


def test_plain_data_has_no_extension_types():
    assert loads_plain(encode({"a": [1, None]})) == {"a": [1, None]}
    with pytest.raises(FrameError, match=f"code {TUPLE} in plain data"):
        loads_plain(encode(ext(TUPLE, 1)))
    with pytest.raises(FrameError, match="no plain data"):
        loads_plain(b"\x93\1")


@pytest.mark.parametrize(
    "obj",
    [
        {number: str(number) for number in range(100_000)},
        {f"key {number}": [number, float(number)] for number in range(100_000)},
        {number << 40: None for number in range(100_000)},
        {(number, number + 1): number for number in range(10_000)},
        {number * 10**30 for number in range(10_000)},
        [{"a": {index: [index] for index in range(1000)}} for _ in range(30)],
        [float(number) / 7 for number in range(100_000)],
        OrderedDict((f"layer.{number}", number) for number in range(5_000)),
        {float(number) * 2.0 ** (61 * power) for number in range(1, 99) for power in range(9)},
    ],
    ids=["ints", "texts", "low bits", "tuples", "set", "nested", "floats", "ordered", "alike"],
)
def test_large_dicts_and_sets_come_over(obj):
    found = loads(dumps(obj, []))
    assert found == obj and type(found) is type(obj)
