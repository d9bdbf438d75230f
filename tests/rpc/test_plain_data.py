"""Plain data, with and without tensors, arrays and references: exact round trips, no pickle."""

from __future__ import annotations

import collections
import enum

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpidist.rpc import codec, decoder
from mpidist.rpc.plain_data import DEPTH, MARK
from tests.rpc.carried import Marked, decoded, described, over

texts = st.text(st.characters(exclude_categories=()), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**300), 2**300),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=12),
    st.just(...),
)


def few(elements, made=st.lists):
    return made(elements, max_size=4)


keys = st.recursive(
    scalars, lambda inner: few(inner).map(tuple) | few(inner, st.frozensets), max_leaves=6
)


def containers(inner):
    return few(inner) | few(inner).map(tuple) | st.dictionaries(keys, inner, max_size=4)


plain = st.recursive(
    scalars | keys | few(keys, st.sets) | few(keys, st.frozensets), containers, max_leaves=20
)
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(
    lambda shape, dtype: torch.arange(np.prod(shape, dtype=int)).to(dtype).view(shape),
    shapes,
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
)
objects = st.one_of(
    tensors,
    st.just(torch.ones(3000)),
    st.builds(lambda flag: torch.nn.Parameter(torch.ones(2), requires_grad=flag), st.booleans()),
    st.builds(lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape), shapes),
    st.binary(max_size=20).map(bytearray),
    st.integers(0, 1000).map(Marked),
)
mixed = st.recursive(scalars | objects | few(keys, st.sets), containers, max_leaves=20)


def has_sets_in_sets(obj, is_in_set=False):
    """Return whether a set contains another set, at any depth."""
    is_set = isinstance(obj, (set, frozenset))
    if is_set and is_in_set:
        return True
    inside = (
        [*obj, *obj.values()]
        if type(obj) is dict
        else obj
        if is_set or type(obj) in (list, tuple)
        else ()
    )
    return any(has_sets_in_sets(item, is_in_set or is_set) for item in inside)


checked = settings(max_examples=200, deadline=None)


@checked
@given(plain)
@example(float("nan"))
@example([float("-inf"), -0.0, complex("nan"), 2**64, -(2**31), True, 1, "\ud800", ...])
@example({(1, frozenset({(None, "a")})): [()], 1.0: {}, False: set()})
def test_plain_data_comes_over_as_it_is(obj):
    content = codec.encode(obj)
    assert content.flags == (codec.PICKLED if has_sets_in_sets(obj) else 0)
    assert not (content.objects or content.references or content.buffers)
    assert described(decoded(content)) == described(obj)


@checked
@given(mixed, st.integers(0, 9))
def test_tensors_arrays_and_references_stand_at_any_place(obj, place):
    content = codec.encode(obj)
    assert bool(content.flags & codec.PICKLED) == has_sets_in_sets(obj)
    assert described(decoded(content, place)) == described(obj)


@checked
@given(shared=containers(mixed), neighbour=mixed)
def test_shared_lists_and_dicts_stay_shared(shared, neighbour):
    obj = [shared, neighbour, {"again": shared}, (neighbour, [shared])]
    content = codec.encode(obj)
    there = decoded(content)
    assert bool(content.flags & codec.PICKLED) == has_sets_in_sets(obj) and described(
        there
    ) == described(obj)
    if type(shared) is not tuple:
        assert there[0] is there[2]["again"] is there[3][1][0]
    if type(neighbour) in (
        list,
        dict,
        bytearray,
        np.ndarray,
        torch.Tensor,
        torch.nn.Parameter,
        Marked,
    ):
        assert there[1] is there[3][0]


def test_equal_lists_that_are_not_shared_stay_apart():
    left, right, other = over([[1], [1], [torch.ones(1)]])
    assert left == right and left is not right
    other.append(left)
    assert right == [1]


@checked
@given(
    args=st.none() | few(mixed) | few(mixed).map(tuple),
    kwargs=st.none() | st.dictionaries(texts, mixed, max_size=3),
)
@example(args=None, kwargs={"a": 1})
@example(args=(), kwargs=None)
@example(args=[1], kwargs={})
def test_arguments_come_over_in_all_combinations(args, kwargs):
    content = codec.encode_call(args, kwargs)
    if has_sets_in_sets([args, kwargs]):
        assert content.flags & codec.PICKLED
        assert described(decoder.arguments(content.flags, decoded(content))) == described(
            (tuple(args or ()), kwargs or {})
        )
        return
    assert not content.flags & codec.PICKLED
    assert bool(content.flags & codec.KEYWORDS) == bool(kwargs)
    made = decoder.arguments(content.flags, decoded(content)) if content.skeleton else ((), {})
    assert described(made) == described((tuple(args or ()), kwargs or {}))


class Point(collections.namedtuple("Point", "x y")):
    """A namedtuple of this module."""


class Number(int):
    """A subclass of a plain class."""


class Bag(dict):
    """A subclass of a container."""


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


class Level(enum.IntEnum):
    """An enumeration of integers."""

    LOW = 1


@pytest.mark.parametrize(
    "obj",
    [
        Point(1, 2),
        Number(3),
        Bag(a=1),
        Color.RED,
        Level.LOW,
        MARK,
        np.float64(1.5),
        np.int32(2),
        torch.float32,
        range(3),
        len,
    ],
    ids=repr,
)
def test_what_is_not_plain_goes_by_pickle(obj):
    for whole in (
        obj,
        [obj],
        {"a": (obj,)},
        {obj: 1} if obj != {"a": 1} else (obj, 1),
        (torch.ones(2), [obj]),
    ):
        content = codec.encode(whole)
        assert content.flags & codec.PICKLED
        assert described(decoded(content)) == described(whole)
        content = codec.encode_call([whole, 1], {"k": whole})
        assert content.flags & codec.PICKLED
        made = decoder.arguments(content.flags, decoded(content))
        assert described(made) == described(((whole, 1), {"k": whole}))


def test_data_that_holds_itself_goes_by_pickle():
    with_tensor: list[object] = [torch.ones(3), Marked(4)]
    for data in ([1], with_tensor):
        data.append(data)
        content = codec.encode(data)
        there = decoded(content)
        assert content.flags & codec.PICKLED and there[-1] is there
        assert described(there[:-1]) == described(data[:-1])
    table: dict[str, object] = {}
    table["self"] = (table,)
    there = over(table)
    assert there["self"][0] is there


def nested(depth, inner):
    for turn in range(depth):
        inner = [inner] if turn % 2 else (inner,)
    return inner


@pytest.mark.parametrize("inner", [1, torch.ones(2)], ids=["plain", "tensor"])
def test_deep_nesting_goes_by_pickle_beyond_a_limit(inner):
    for depth, is_pickled in ((DEPTH - 1, False), (DEPTH + 2, True)):
        content = codec.encode(nested(depth, inner))
        assert bool(content.flags & codec.PICKLED) == is_pickled
        there = decoded(content)
        for _ in range(depth):
            (there,) = there
        assert described(there) == described(inner)


def test_sets_in_sets_go_by_pickle():
    """marshal writes each member of a set twice, so its time would double with each nesting."""
    shared = (frozenset({1}),)
    for obj in (
        {frozenset()},
        {(1, (2, frozenset({3})))},
        {1: {frozenset({4})}},
        [shared, {shared}],
        {frozenset({(frozenset(),)}): 1},
    ):
        content = codec.encode(obj)
        assert content.flags & codec.PICKLED and described(decoded(content)) == described(obj)
        assert codec.encode_call([obj], {}).flags & codec.PICKLED
    for obj in (
        [{1}, {2}, frozenset({(3, (4,))})],
        {frozenset({5}): {6}},
        [{(7,)}, {8}],
        shared,
        [shared, {9}],
    ):
        content = codec.encode(obj)
        assert not content.flags and described(decoded(content)) == described(obj)


def test_sets_nested_deeply_are_written_at_all():
    """With a time that doubles at each level this would never end."""
    obj = frozenset()
    for _ in range(90):
        obj = frozenset({obj})
    there = decoded(codec.encode([obj]))
    assert there == [obj]


def test_marks_in_keys_and_sets_go_by_pickle():
    tensor = torch.ones(2)
    for obj in ({(tensor, 1)}, {tensor: 1}, {1: {MARK}}):
        assert codec.encode(obj).flags & codec.PICKLED
    ((there, one),) = over({(tensor, 1)})
    assert torch.equal(there, tensor) and one == 1
