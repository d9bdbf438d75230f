"""Values of all types and combinations in calls, compared exactly on both workers."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import itertools
import math
import pathlib
import struct
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import mpidist.rpc as rpc
from tests.rpc.limits import CALL_S, limit_of_tests

pytestmark = [
    pytest.mark.mpi(min_size=1),
    # Warnings of torch for each new sparse or quantized tensor.
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:torch.quantize:UserWarning"),
]


_limit = limit_of_tests(100)


class Colour(enum.Enum):
    RED = "red"
    BLUE = ("b", 1)


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    x: Any
    y: Any = None


class Table(dict):
    """A dictionary with an attribute of its own."""

    note: Any = None


class Words(list):
    pass


class Whole(int):
    pass


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __eq__(self, other):
        return type(other) is Slotted and (self.left, self.right) == (other.left, other.right)

    __hash__ = None


def holds_itself():
    made = [1, []]
    made.append(made)
    made[1].append((made, {"again": made}))
    return made


def dictionary_within_itself():
    made = {"a": ()}
    made["self"] = made
    made["list"] = [made]
    return made


def shared():
    inner, text, pair = [1], "a text of some length" * 3, (1, [2])
    return {
        "lists": [inner, inner, [1]],
        "texts": [text, text],
        "pairs": (pair, pair),
        "deep": [[inner], {"x": inner}],
    }


def table():
    made = Table(a=1, b=[2])
    made.note = ["an attribute"]
    return made


def default_dictionary():
    made = collections.defaultdict(list)
    made["a"].append(1)
    return made


def tensor_twice():
    tensor, small = torch.arange(20_000.0), torch.ones(3)
    return [tensor, small, {"again": tensor, "small": (small, small)}, tensor]


def views_of_one():
    whole = torch.arange(24.0).view(4, 6)
    return [whole, whole[1], whole[:, ::2], whole.t()]


def arrays():
    grid = np.arange(24.0).reshape(4, 6)
    return [
        grid, grid.T, grid[::2, 1::2], grid[::-1], np.asfortranarray(grid), np.array(3.5),
        np.array([]), np.zeros((0, 4)), np.array([1, "a", None, [2]], dtype=object),
        np.array(["a", "ä\0"]), np.array([b"x", b"yy"]),
        np.array([(1, 2.5, "a")], dtype=[("n", "i4"), ("x", "f8"), ("s", "U3")]),
        np.array([True, False]), np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
        np.arange(5, dtype=">i4"), np.array([1 + 2j]), np.arange(100_000), np.arange(100_000)[::3],
        np.float16([1.5]),
    ]  # fmt: skip


def tensors():
    grid = torch.arange(24.0).view(4, 6)
    index = torch.tensor([[0, 2, 0], [1, 0, 1]])
    return [
        grid, grid.t(), grid[::2, 1::2], torch.tensor(3.5), torch.empty(0), torch.empty(0, 4),
        torch.tensor([True, False]), torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3)),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.nn.Parameter(torch.ones(9000)), torch.nn.Buffer(torch.ones(2)),
        torch.ones(2, dtype=torch.bfloat16), torch.zeros(3).expand(2, 3), grid.unfold(1, 2, 1),
        torch.sparse_coo_tensor(index, torch.ones(3), (3, 2)),
        torch.sparse_coo_tensor(index, torch.ones(3), (3, 2)).coalesce(),
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]  # fmt: skip


def numbers():
    return [
        0, -1, 2**31, 2**63, -(2**63) - 1, 2**64, 2**100, -(2**100), 2**4000, True, False, 0.0,
        -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e308, 1 + 2j, complex(-0.0, math.nan),
        Whole(3), fractions.Fraction(1, 3), decimal.Decimal("1.10"), decimal.Decimal("NaN"),
        np.float32(1.5), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j),
        np.float64(-0.0), np.str_("a"), np.bytes_(b"a"), np.datetime64("2020-01-01"),
        np.timedelta64(3, "s"), np.void(b"ab"),
    ]  # fmt: skip


def texts():
    return [
        "", "ä€😀\0", "\ud800", "x" * 100_000, b"", b"\0\xff", bytes(100_000), bytearray(),
        bytearray(b"ab"), bytearray(100_000), array.array("d", [1.5, -0.0]),
        pathlib.PurePosixPath("a/b"), uuid.UUID(int=5), datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
        datetime.timedelta(days=-1, microseconds=7), datetime.timezone.utc,
    ]  # fmt: skip


def containers():
    return [
        [], (), {}, set(), frozenset(), [[], [[]], ()], ((), ((),)), {"": {}}, [{}, {(): []}],
        ({"a": [(1, {"b": (2, [3])})]},),
        {(1, "a"): 1, 3: "int", 2.5: "float", None: "none", True: "bool",
         frozenset({1, (2,)}): "set", b"b": "bytes"},
        {"z": 1, "a": 2, "m": 3}, {1, "a", None, (1, 2), 2.5},
        frozenset({frozenset(), frozenset({1})}), Point(1, [2]), Point(Point(1)),
        collections.OrderedDict([("b", 1), ("a", 2)]), default_dictionary(),
        collections.Counter("abca"), collections.deque([1, 2], maxlen=2),
        collections.ChainMap({"a": 1}, {"b": 2}), table(), Words([1, Words()]),
        Slotted(1, Point(2)), range(3, 10, 2), slice(1, None, [2]),
        itertools.repeat(1, 2).__reduce__()[1], torch.Size([2, 3]),
        [torch.Size([]), (torch.Size([1]),)], list(range(3000)), [[[[[[[[["deep"]]]]]]]]],
    ]  # fmt: skip


def names():
    return [
        None, Ellipsis, NotImplemented, StopIteration, StopIteration(3),
        ValueError("a value, not raised"), KeyError, int, type(None), len, math.sin, np.float32,
        np.dtype("f4"), torch.float32, torch.device("cpu"), torch.device("cuda", 1),
        torch.sparse_csr, torch.channels_last, torch.add, torch.nn.Linear, Colour.RED, Colour.BLUE,
        Level.LOW, Mode.READ, Mode.READ | Mode.WRITE, Colour, Point, same,
    ]  # fmt: skip


SAMPLES = {
    made.__name__: made
    for made in (
        numbers, texts, containers, names, arrays, tensors, shared, holds_itself,
        dictionary_within_itself, tensor_twice, views_of_one,
    )
}  # fmt: skip


def same(a, b, path="value", seen=None):
    """Return where two values differ: in type, content, order, or in shared parts."""
    here, there = seen = ({}, {}) if seen is None else seen
    if type(a) is not type(b):
        return [f"{path}: {type(a)} is not {type(b)}"]
    # What is one object here must be one there. Both are kept alive, so that no number stands for
    # two objects.
    if isinstance(a, (list, dict, set, bytearray, torch.Tensor)):
        if id(a) in here and here[id(a)][1] is b:
            return []
        if id(a) in here or id(b) in there:
            return [f"{path}: is one object with another place in one of the two alone"]
        here[id(a)] = there[id(b)] = (a, b)
    kids = children(a, b, path)
    if kids is None:
        return [] if is_equal(a, b) else [f"{path}: {a!r} is not {b!r}"]
    found = [] if len(a) == len(b) else [f"{path}: {len(a)} parts are not {len(b)}"]
    for name, one, other in kids:
        found += same(one, other, f"{path}{name}", seen)
    return found


def children(a, b, path):
    """Return pairs of parts of two containers of one type, with names; None for other objects."""
    if isinstance(a, (list, tuple, collections.deque)) and not isinstance(a, torch.Size):
        kids = [(f"[{place}]", *pair) for place, pair in enumerate(zip(a, b, strict=False))]
        return kids
    if isinstance(a, dict):
        kids = [(f".key{place}", *pair) for place, pair in enumerate(zip(a, b, strict=False))]
        kids += [(f"[{key!r}]", a[key], b[key]) for key in list(a) if key in b]
        for attribute in ("note", "default_factory"):
            if hasattr(a, attribute):
                kids.append((f".{attribute}", getattr(a, attribute), getattr(b, attribute)))
        return kids
    if isinstance(a, np.ndarray) and a.dtype == object:
        return (
            [("[...]", a.tolist(), b.tolist())] if a.shape == b.shape else [("", a.shape, b.shape)]
        )
    return None


def is_equal(a, b):
    """Return whether two values of one type other than containers are equal."""
    if isinstance(a, torch.Tensor):
        return is_same_tensor(a, b)
    if isinstance(a, np.ndarray):
        layout = (a.dtype, a.shape, a.flags.f_contiguous and not a.flags.c_contiguous)
        if layout != (b.dtype, b.shape, b.flags.f_contiguous and not b.flags.c_contiguous):
            return False
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    if isinstance(a, BaseException):
        return a.args == b.args
    if isinstance(
        a, (type, enum.Enum, type(len), type(same), type(None), type(...), type(NotImplemented))
    ):
        return a is b
    if isinstance(a, decimal.Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def is_same_tensor(a, b):
    if (a.dtype, a.shape, a.layout, a.requires_grad, a.device) != (
        b.dtype,
        b.shape,
        b.layout,
        b.requires_grad,
        b.device,
    ):
        return False
    if a.layout is torch.sparse_coo:
        parts = [(a._indices(), b._indices()), (a._values(), b._values())]
        return a.is_coalesced() == b.is_coalesced() and all(
            torch.equal(one, other) for one, other in parts
        )
    return np.array_equal(bits(a), bits(b))


def bits(tensor):
    """The bytes of a tensor's elements in their order: a NaN and a zero's sign count."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy() if plain.numel() else np.array([])


def differing_there(name, value):
    """Return differences of a received value from a local one; run by the other worker."""
    return same(value, SAMPLES[name]())


def keyword_only(*, name, value):
    return same(value, SAMPLES[name]()), value


def made_here(name):
    return SAMPLES[name]()


def echo(*args, **kwargs):
    return args, kwargs


def call(to, function, *args, **kwargs):
    return rpc.rpc_sync(to, function, args=args, kwargs=kwargs, timeout=CALL_S)


@pytest.mark.parametrize("name", SAMPLES)
def test_values_survive_alone(workers, to, name):
    assert call(to, differing_there, name, SAMPLES[name]()) == []
    there, back = call(to, keyword_only, name=name, value=SAMPLES[name]())
    assert there == [] and differing_there(name, back) == []
    assert differing_there(name, call(to, made_here, name)) == []
    assert (
        differing_there(
            name, rpc.remote(to, made_here, args=(name,), timeout=CALL_S).to_here(timeout=CALL_S)
        )
        == []
    )
    assert (
        differing_there(name, rpc.rpc_async(to, made_here, args=(name,), timeout=CALL_S).wait())
        == []
    )


class Company:
    """A value among tensors and references, in containers of all kinds."""

    def __init__(self, name, rref):
        self.name, self.rref = name, rref
        self.tensor, self.small = torch.arange(10_000.0), torch.ones(2)
        value = SAMPLES[name]()
        self.inside = {
            "value": value,
            "all": (rref, [self.tensor, value, {"r": rref, 2.5: (self.small, rref)}]),
            (1, 2): value,
        }


def wrong_in(company):
    """Return the names of parts that differ from those of ``Company``; run by the receiver."""
    inside, value = company.inside, company.inside["value"]
    rref, (tensor, again, last) = inside["all"]
    found = differing_there(company.name, value)
    is_one = (
        rref is company.rref
        and last["r"] is rref
        and last[2.5][1] is rref
        and again is value
        and inside[1, 2] is value
    )
    is_one = is_one and tensor is company.tensor and last[2.5][0] is company.small
    found += [] if is_one else ["objects that were one are two"]
    found += (
        []
        if torch.equal(tensor, torch.arange(10_000.0)) and torch.equal(company.small, torch.ones(2))
        else ["tensors"]
    )
    return found + ([] if rref.to_here(timeout=CALL_S) == company.name else ["the reference"])


def checked(company):
    return wrong_in(company), company


def company_of(name, rref):
    return Company(name, rref)


@pytest.mark.parametrize("name", SAMPLES)
def test_values_survive_among_tensors_and_references(group, workers, to, name):
    owner = workers[(group.rank + 2) % group.size]
    rref = rpc.remote(owner, str, args=(name,))
    there, back = call(to, checked, Company(name, rref))
    assert there == [] and wrong_in(back) == []
    there, back = call(to, checked, company=Company(name, rpc.RRef(name)))
    assert there == [] and wrong_in(back) == []
    assert wrong_in(call(to, company_of, name, rref)) == []


def test_names_of_keywords_are_the_callers(workers, to):
    keywords = dict.fromkeys(
        (
            "to",
            "func",
            "args",
            "kwargs",
            "timeout",
            "self",
            "rref",
            "name",
            "mode",
            "agent",
            "function",
        ),
        1,
    )
    assert rpc.rpc_sync(to, echo, args=(0,), kwargs=keywords) == ((0,), keywords)
    assert rpc.rpc_async(to, echo, kwargs=keywords).wait() == ((), keywords)
    assert rpc.remote(to, echo, kwargs=keywords).to_here() == ((), keywords)
    del keywords["self"]
    speaker = rpc.remote(to, Speaker)
    assert speaker.rpc_sync().say(**keywords) == keywords
    assert speaker.rpc_async().say(**keywords).wait() == keywords
    assert speaker.remote().say(**keywords).to_here() == keywords


class Speaker:
    def say(self, **kwargs):
        return kwargs


def test_arguments_in_any_container(workers, to):
    assert rpc.rpc_sync(to, echo) == ((), {}) and rpc.rpc_sync(to, echo, args=(), kwargs={}) == (
        (),
        {},
    )
    assert rpc.rpc_sync(to, echo, args=[1, 2]) == ((1, 2), {})
    assert rpc.rpc_sync(to, echo, args=Point(1, 2)) == ((1, 2), {})
    assert rpc.rpc_sync(to, echo, args=(None,), kwargs=collections.OrderedDict(b=1, a=2)) == (
        (None,),
        {"b": 1, "a": 2},
    )
    assert list(rpc.rpc_sync(to, echo, kwargs={"b": 1, "a": 2})[1]) == ["b", "a"]


def unsent(kind):
    grid = torch.eye(4)
    if kind == "quantized":
        return torch.quantize_per_tensor(grid, 0.5, 1, torch.quint8)
    return getattr(grid, f"to_{kind}")(*[(2, 2)] * kind.startswith("sparse_bs"))


@pytest.mark.parametrize("kind", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc",
                                  "quantized"])  # fmt: skip
def test_tensors_of_other_layouts_are_refused_by_the_sender(group, workers, to, kind):
    tensor = unsent(kind)
    for call in (
        lambda: rpc.rpc_sync(to, same, args=(tensor, 1)),
        lambda: rpc.rpc_sync(to, same, args=([Point(tensor)], 1)),
        lambda: rpc.rpc_async(to, same, args=(1,), kwargs={"b": {"x": tensor}}).wait(),
        lambda: rpc.remote(to, same, args=(tensor, 1)).to_here(),
        lambda: rpc.rpc_sync(to, unsent, args=(kind,)),
    ):
        with pytest.raises(TypeError, match=f"{kind}.* cannot be sent: send its"):
            call()
    assert rpc.rpc_sync(to, same, args=(1, 1)) == []
    group.barrier()


@pytest.mark.parametrize("differ", [
    (1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({1: 2, 3: 4}, {3: 4, 1: 2}),
    (bytearray(b"a"), b"a"), (np.float32(1), 1.0),
    (torch.ones(2), torch.nn.Parameter(torch.ones(2))), (Point(1), (1, None)),
    ({"a": 1}, collections.OrderedDict(a=1)), (torch.Size([1]), (1,)),
    (np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))), (shared(), eval(repr(shared()))),
    (Level.LOW, 1), (Whole(1), 1), ([1, 2], [1]), ({"a": 1}, {"b": 1}),
])  # fmt: skip
def test_differences_are_seen(differ):
    a, b = differ
    assert same(a, b) and same(b, a)
