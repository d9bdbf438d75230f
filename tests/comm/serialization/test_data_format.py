"""Data-only objects: exact round trips, refusals with the place, and data from any bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.comm.serialization import data_format, data_reader, data_writer
from mpidist.errors import FrameError, NotPlainData

Ext, encode = msgspec.msgpack.Ext, msgspec.msgpack.encode

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.binary(),
    st.text(st.characters(exclude_categories=[])),  # surrogates as well
    st.just(...),
    st.sampled_from(
        [
            torch.float32,
            torch.int8,
            torch.device("cpu"),
            torch.device("cuda", 1),
            torch.Size((2, 3)),
        ]
    ),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(1 << 63), (1 << 63) - 1)),
    st.builds(np.bool_, st.booleans()),
)
KEYS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)
    ),
    max_leaves=5,
)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
    ),
    max_leaves=20,
)


def there_and_back(obj, **how):
    objects = []
    return data_reader.loads(data_writer.dumps(obj, objects), objects, **how)


def typed_repr(obj):
    """Return an object as text, with all types; sets are sorted.

    NaN equals NaN, and -0.0 differs from 0.0.
    """
    kind = type(obj).__name__
    if isinstance(obj, (list, tuple)):
        return f"{kind}[{', '.join(map(typed_repr, obj))}]"
    if isinstance(obj, dict):
        pairs = (f"{typed_repr(key)}: {typed_repr(value)}" for key, value in obj.items())
        return f"{kind}[{', '.join(pairs)}]"
    if isinstance(obj, (set, frozenset)):
        return f"{kind}[{', '.join(sorted(map(typed_repr, obj)))}]"
    return f"{kind} {obj!r}"


@settings(max_examples=200, deadline=None)
@given(DATA)
def test_what_goes_out_comes_back_exactly(obj):
    assert typed_repr(there_and_back(obj)) == typed_repr(obj)


def test_objects_of_the_table_stand_by_number_each_once():
    tensor, array = torch.ones(2), np.arange(3)
    objects = []
    written = data_writer.dumps(
        [tensor, {"a": array, "b": tensor}, array[::2], bytearray(b"x")], objects
    )
    assert (
        len(objects) == 4
        and objects[0] is tensor
        and objects[1] is array
        and objects[2].flags.c_contiguous
    )
    read = data_reader.loads(written, objects)
    assert read[0] is tensor and read[1]["b"] is tensor and read[2].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("obj", "place"),
    [
        (object(), ""),
        ([1, {"x": (0, object())}], "[1]['x'][1]"),
        ({(1, 2): {3: len}}, "[(1, 2)][3]"),
        ([np.array([object()])], "[0]"),
        ([np.array(["text"])], "[0]"),
        ({"a": OrderedDict(b=[len])}, "['a']['b'][0]"),
        (type("Ordered", (OrderedDict,), {})(a=1), ""),
        ([namedtuple("P", "x")(1)], "[0]"),
        (sys, ""),
        (torch.nn.Linear(1, 1), ""),
        ([type("Text", (str,), {})("x")], "[0]"),
    ],
)
def test_what_is_no_data_is_refused_with_its_place(obj, place):
    with pytest.raises(NotPlainData, match="no plain data") as caught:
        data_writer.dumps(obj, [])
    assert caught.value.place.endswith(place)


def test_a_state_dict_keeps_its_order_and_its_metadata():
    state = torch.nn.Linear(2, 1).state_dict()
    back = there_and_back(state)
    assert (
        type(back) is OrderedDict
        and list(back) == list(state)
        and back._metadata == state._metadata
    )
    assert back["weight"] is state["weight"]
    state.mine = 1
    with pytest.raises(NotPlainData, match=r"attributes \(_metadata, mine\)"):
        data_writer.dumps(state, [])


def test_data_that_holds_itself_is_refused():
    inner = []
    inner.append(inner)
    with pytest.raises(NotPlainData, match="holds itself"):
        data_writer.dumps(inner, [])
    inner = {}
    inner["x"] = (inner,)
    with pytest.raises(NotPlainData, match="holds itself"):
        data_writer.dumps(inner, [])


def nested(code, times):
    data = encode([])
    for _ in range(times):
        data = encode([Ext(code, data)])
    return data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xdd\xff\xff\xff\xff",  # 2^32 items announced
        b"\xdf\x0f\xff\xff\xff\x01",
        b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
        b"\x91" * 100_000 + b"\x01",
        b"\x81\x91\x80\x01",  # a key that holds a dict
        b"\xa3\xed\xa0\x80",  # a surrogate in a str
        encode(Ext(data_format.OBJECT, b"\0\0\0\0")),
        encode(Ext(data_format.OBJECT, b"\0")),
        encode(Ext(data_format.OBJECTS, data_format.RANGE.pack(0, 1))),
        encode(Ext(data_format.OBJECTS, data_format.RANGE.pack(0, 0))),
        encode(Ext(data_format.OBJECTS, b"\0")),
        encode(Ext(data_format.TUPLES, encode([[1], "ab"]))),
        encode(Ext(data_format.TUPLES, encode([[1], {}]))),
        encode(Ext(data_format.TUPLES, b"\x01")),
        encode(Ext(data_format.TUPLE, b"\x01")),
        encode(Ext(data_format.TUPLE, b"")),
        encode(Ext(data_format.SET, encode([[1]]))),
        encode(Ext(data_format.PAIRS, encode([1]))),
        encode(Ext(data_format.ORDERED, encode([1]))),
        encode(Ext(data_format.ORDERED, encode([{}, None]))),
        encode(Ext(data_format.ORDERED, encode([[1], None]))),
        encode(Ext(data_format.PAIRS, encode([{}, 1]))),
        encode(Ext(data_format.COMPLEX, b"\0" * 15)),
        encode(Ext(data_format.TEXT, b"\xff")),
        encode(Ext(data_format.ELLIPSIS, b"\0")),
        encode(Ext(data_format.SCALAR, encode(["object", b"\0" * 8]))),
        encode(Ext(data_format.SCALAR, encode(["bool", b"\2"]))),
        encode(Ext(data_format.SCALAR, encode(["float32", b"\0" * 8]))),
        encode(Ext(data_format.SCALAR, encode([{}, b""]))),
        encode(Ext(data_format.DTYPE, b"__class__")),
        encode(Ext(data_format.DEVICE, encode(["cuda:0; import os", 0]))),
        encode(Ext(data_format.DEVICE, encode(["cpu", -2]))),
        encode(Ext(data_format.DEVICE, encode([[], None]))),
        encode(Ext(data_format.SIZE, encode([-1]))),
        encode(Ext(data_format.SIZE, encode([1 << 63]))),
        encode(Ext(data_format.FIRST_OWN, encode([]))),
        encode(Ext(31, encode([]))),
        encode(Ext(-2, b"")),
        nested(data_format.TUPLE, data_format.DEPTH + 1),
        nested(data_format.PAIRS, 2),
    ],
)
def test_bytes_that_are_no_data_are_refused(data):
    with pytest.raises(FrameError):
        data_reader.loads(data)


def test_ranges_hold_no_more_objects_than_came():
    """Otherwise n ranges of n objects would be n² items, of a message of n bytes."""
    objects = [torch.ones(number) for number in range(6)]
    halves = [Ext(data_format.OBJECTS, data_format.RANGE.pack(first, 3)) for first in (0, 3)]
    first, second = data_reader.loads(encode(halves), objects)
    assert [*map(id, first + second)] == [*map(id, objects)]
    for ranges in ([*halves, halves[0]], [Ext(data_format.OBJECTS, data_format.RANGE.pack(4, 3))]):
        with pytest.raises(FrameError, match="a range of 3 objects beyond the 6"):
            data_reader.loads(encode(ranges), objects)


def test_a_list_of_tensors_with_one_that_is_no_data_is_refused_with_its_place():
    tensors = [torch.ones(1), torch.ones(2), torch.ones(3), torch.ones(1, device="meta")]
    with pytest.raises(NotPlainData) as caught:
        data_writer.dumps([tensors], [])
    assert caught.value.place == "[0][3]"


def test_a_caller_adds_kinds_by_codes_of_its_own():
    class Point:
        x = 3

    def extend(obj):
        return (40, [obj.x]) if type(obj) is Point else (41, b"raw") if obj is Point else None

    def read(code, data, items):
        return code, items(data) if code == 40 else bytes(data)

    written = data_writer.dumps([(Point(),), Point], [], extend)
    assert data_reader.loads(written, (), read) == [((40, [3]),), (41, b"raw")]
    with pytest.raises(FrameError, match="unknown code 40"):
        data_reader.loads(written)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_data_or_refused(data):
    try:
        data_reader.loads(data, [torch.ones(1)], lambda code, values: None)
    except FrameError:
        pass
