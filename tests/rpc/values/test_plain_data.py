"""Plain data, with and without tensors, arrays and references: exact round trips, no pickle."""

from __future__ import annotations

import collections
import enum
import operator
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpidist.comm.serialization.data_format import DEPTH
from mpidist.rpc.values import codec
from tests.rpc.round_trips import Marked, decoded, described, encode_call, over

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


def has_repeated(obj, seen=None):
    """Return whether a container occurs twice in an object, at any depth."""
    seen = {} if seen is None else seen
    if type(obj) not in (list, tuple, dict, set, frozenset):
        return False
    if id(obj) in seen:
        return True
    seen[id(obj)] = obj
    inside = [*obj, *obj.values()] if type(obj) is dict else obj
    return any([has_repeated(item, seen) for item in inside])


def data_flags(flags):
    """Return flags without the one for data of MessagePack's own types alone."""
    return flags & ~codec.PLAIN


checked = settings(max_examples=80, deadline=None)


@checked
@given(plain)
@example(float("nan"))
@example([float("-inf"), -0.0, complex("nan"), 2**64, -(2**31), True, 1, "\ud800", ...])
@example({(1, frozenset({(None, "a")})): [()], 1.0: {}, False: set()})
def test_plain_data_comes_over_as_it_is(obj):
    content = codec.encode(obj)
    assert data_flags(content.flags) == (codec.PICKLED if has_repeated(obj) else 0)
    assert not (content.objects or content.references or content.buffers)
    assert described(decoded(content)) == described(obj)


@checked
@given(mixed, st.integers(0, 9))
def test_tensors_arrays_and_references_stand_at_any_place(obj, place):
    content = codec.encode(obj)
    assert bool(content.flags & codec.PICKLED) == has_repeated(obj)
    assert described(decoded(content, place)) == described(obj)


@checked
@given(shared=containers(mixed), neighbour=mixed)
def test_shared_lists_and_dicts_stay_shared(shared, neighbour):
    obj = [shared, neighbour, {"again": shared}, (neighbour, [shared])]
    content = codec.encode(obj)
    there = decoded(content)
    assert bool(content.flags & codec.PICKLED) == has_repeated(obj) and described(
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
    content = encode_call(args, kwargs)
    if has_repeated([list(args or ()), dict(kwargs or {})]):
        assert content.flags & codec.PICKLED
        assert described(codec.arguments(content.flags, decoded(content))) == described(
            (tuple(args or ()), kwargs or {})
        )
        return
    assert not content.flags & codec.PICKLED
    assert bool(content.flags & codec.KEYWORDS) == bool(kwargs)
    made = codec.arguments(content.flags, decoded(content)) if content.skeleton else ((), {})
    assert described((tuple(made[0]), made[1])) == described((tuple(args or ()), kwargs or {}))


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
        Marked,
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
        content = encode_call([whole, 1], {"k": whole})
        assert content.flags & codec.PICKLED
        made = codec.arguments(content.flags, decoded(content))
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


@pytest.mark.parametrize(
    "obj",
    [np.float64(1.5), np.int32(2), torch.float32, torch.Size([2, 3]), torch.device("cpu")],
    ids=repr,
)
def test_values_of_numpy_and_torch_are_data(obj):
    for whole in (obj, [obj, 1], {"a": (obj,)}, {obj: 1}, (torch.ones(2), [obj])):
        content = codec.encode(whole)
        assert not content.flags & codec.PICKLED
        assert described(decoded(content)) == described(whole)


def test_an_ordered_dict_is_data_with_its_metadata():
    state = torch.nn.Linear(2, 3).state_dict()
    content = codec.encode([state])
    (there,) = decoded(content)
    assert not content.flags & codec.PICKLED and type(there) is type(state)
    assert there._metadata == state._metadata and list(there) == list(state)


def test_lists_of_tuples_and_of_tensors_come_over_exactly():
    """They have extension types of their own, for all their items together."""
    rows = [(number, float(number), f"{number}", None) for number in range(10)]
    tensors = [torch.full((2,), float(number)) for number in range(70)]
    for obj in (
        rows,
        [rows, tensors, tensors[0]],
        (tensors[3], tensors),
        [tensors, list(tensors)],
        tensors + tensors,
        [*tensors[:9], tensors[0]],
        [*rows, [1]],
        [*rows, (1, (2,))],
        [*rows, (1, 1 << 70, "\ud800")],
        [*tensors, 1],
        [torch.ones(2), *map(torch.nn.Parameter, tensors)],
    ):
        content = codec.encode(obj)
        assert not content.flags & codec.PICKLED
        assert described(decoded(content)) == described(obj)
    there = over([tensors, tensors[5], list(tensors)])
    assert there[1] is there[0][5] and all(map(operator.is_, there[0], there[2]))


def test_one_container_twice_goes_by_pickle_and_stays_one():
    inner = {1, 2}
    row = (1, 2.0)
    for shared in ([], [1], {}, {"a": 1}, inner, frozenset({3}), row, (inner,), OrderedDict(a=1)):
        for obj in ([shared, shared], {"a": shared, "b": [shared]}, (shared, (1, shared))):
            content = codec.encode(obj)
            there = decoded(content)
            assert content.flags & codec.PICKLED and described(there) == described(obj)
        args, kwargs = arguments_over((shared,), {"again": [shared]})
        assert args[0] is kwargs["again"][0]
    assert codec.encode([row] * 10).flags & codec.PICKLED
    doubled = ()
    for _ in range(60):
        doubled = (doubled, doubled)  # written twice at each level it would never end
    there = over(doubled)
    assert there[0] is there[1]


def arguments_over(args, kwargs):
    content = encode_call(args, kwargs)
    return codec.arguments(content.flags, decoded(content))


def test_sets_nested_deeply():
    obj = frozenset()
    for _ in range(90):
        obj = frozenset({obj})
    there = decoded(codec.encode([obj]))
    assert there == [obj]


def test_tensors_in_keys_and_sets():
    tensor = torch.ones(2)
    ((there, one),) = over({(tensor, 1)})
    assert torch.equal(there, tensor) and one == 1
    ((key, value),) = over({tensor: tensor}).items()
    assert key is value and torch.equal(key, tensor)
