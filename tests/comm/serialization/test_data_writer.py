"""Writer of data: what it writes where, each object once, and what it refuses with the place."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
import pytest
import torch

from mpidist.comm.serialization import data_writer
from mpidist.comm.serialization.data_format import (
    DEPTH,
    FIRST_OWN,
    INTEGER,
    NUMBER,
    OBJECT,
    OBJECTS,
    PAIRS,
    RANGE,
    TUPLE,
    TUPLES,
)
from mpidist.comm.serialization.data_writer import Ext, Inexact, dumps
from mpidist.errors import NotPlainData

decode = msgspec.msgpack.decode


def written(obj, objects=None, **how):
    """Return what MessagePack reads of an object, with its extension types as they are."""
    return decode(dumps(obj, [] if objects is None else objects, **how))


def test_messagepacks_own_types_are_written_as_they_are():
    for obj in (None, True, -7, 2.0, "a", b"b", [1, [2]], {"a": {1: "b"}}):
        assert written(obj) == obj
    assert type(written(2.0)) is float


def test_what_messagepack_lacks_is_an_extension_type():
    assert written((1, "a")) == Ext(TUPLE, data_writer.encode([1, "a"]))
    assert written({(1,): 2}).code == PAIRS and written(1 << 70).code == INTEGER
    assert written([(1, 2)] * 4).code == TUPLES and type(written([(1, 2)] * 3)) is list
    assert [item.code for item in written([(1, [2])] * 4)] == [TUPLE] * 4


def test_each_object_of_the_table_is_listed_once_and_has_a_number():
    first, second, objects = torch.ones(2), np.ones(3), []
    marks = written([first, second, first], objects)
    assert objects[0] is first and objects[1] is second and len(objects) == 2
    assert marks == [Ext(OBJECT, NUMBER.pack(number)) for number in (0, 1, 0)]
    # Objects of the message before keep their numbers.
    assert written({"a": second}, objects) == {"a": Ext(OBJECT, NUMBER.pack(1))}
    many = [torch.ones(1) for _ in range(5)]
    assert written(many, objects) == Ext(OBJECTS, RANGE.pack(2, 5)) and len(objects) == 7
    assert len(written([*many, many[0]], objects)) == 6  # no range: one occurs twice


def test_an_exact_object_comes_over_as_it_is_or_not_at_all():
    inner = [1]
    columns = np.ones((4, 3), order="F")
    pair = (1, 2)
    for obj in ([inner, (inner,)], {"a": columns}, [pair] * 4, [pair, [pair] * 4]):
        assert written(obj) is not None
        with pytest.raises(Inexact):
            dumps(obj, [], is_exact=True)
    assert written([inner, [1], columns.T], is_exact=True)[:2] == [[1], [1]]


def test_a_failed_first_attempt_leaves_no_objects():
    tensor, objects = torch.ones(1), []
    marks = written([tensor, 1 << 70, "\ud800"], objects)
    assert [one is tensor for one in objects] == [True] and marks[0].code == OBJECT


def test_what_is_no_data_is_refused_with_its_place():
    nested = [[]]
    for _ in range(DEPTH):
        nested = [nested, ...]
    nested_itself = [...]
    nested_itself.append(nested_itself)
    attributed = OrderedDict(a=1)
    attributed.more = 2
    for obj, place in (
        ([0, {"a": (1, object())}], "[1]['a'][1]"),
        ({(1,): {2: object()}}, "[(1,)][2]"),
        ({(object(),): 1}, " key (<object"),
        (nested, ""),
        (nested_itself, ""),
        ([attributed], "[0]"),
        ([torch.ones(1).to("meta")], "[0]"),
        ([np.array(["a"], object)], "[0]"),
    ):
        with pytest.raises(NotPlainData) as caught:
            dumps(obj, [])
        assert caught.value.place.startswith(place), (obj, caught.value.place)


def test_a_callers_kinds_are_written_by_the_caller():
    def extend(obj):
        return (FIRST_OWN, ["own"]) if obj is len else None

    assert written([len], extend=extend) == [Ext(FIRST_OWN, data_writer.encode(["own"]))]
    with pytest.raises(NotPlainData):
        dumps([max], [], extend)
    assert written(len, extend=lambda obj: (FIRST_OWN, b"raw")) == Ext(FIRST_OWN, b"raw")


@pytest.mark.parametrize("is_exact", [False, True])
def test_what_is_too_long_is_refused_with_the_place(is_exact):
    # Zeros that are not touched take no memory.
    long = bytes(1 << 32)
    for obj, place in ((long, ""), ([1, long], "[1]"), ({"a": (1, [long])}, "['a'][1][0]")):
        with pytest.raises(NotPlainData, match=r"bytes of 4\.0 GiB are no plain data") as caught:
            dumps(obj, [], is_exact=is_exact)
        assert caught.value.place == place
