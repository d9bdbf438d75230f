"""Round trips of objects as data and by pickle: sharing, references, and errors."""

from __future__ import annotations

import collections
import itertools
import pickle

import numpy as np
import pytest
import torch

from mpidist.errors import FrameError, NotPlainData
from mpidist.rpc import worker_gather
from mpidist.rpc.names import callee
from mpidist.rpc.values import codec
from tests.rpc.round_trips import READER, Marked, decoded, described, encode_call, memory_of, over

Pair = collections.namedtuple("Pair", "left right")


class Other:
    """An object that only pickle can carry; it holds any other."""

    def __init__(self, held):
        self.held = held


def by_both(obj):
    """Return the object after a round trip as data, and after one by pickle."""
    return over([obj])[0], over(Other(obj)).held


@pytest.mark.parametrize("numel", [0, 1, 7, 3000, 100_000])
def test_tensors_come_by_either_way_shared_and_writable(numel):
    tensor = torch.arange(numel, dtype=torch.float32)
    for there in by_both([tensor, {"again": tensor}, torch.nn.Parameter(tensor)]):
        assert described(there) == described(
            [tensor, {"again": tensor}, torch.nn.Parameter(tensor)]
        )
        assert there[1]["again"] is there[0]
        there[0].fill_(1)  # it owns memory that it may write


def test_views_keep_their_strides_and_share_by_either_way():
    base = torch.arange(24.0).view(4, 6)
    for left, turned, whole in by_both([base[:2], base.t(), base]):
        left.zero_()
        assert torch.equal(whole[:2], torch.zeros(2, 6)) and turned.stride() == (1, 6)
        assert turned[:, :2].count_nonzero() == 0 and torch.equal(whole[2:], base[2:])


def test_attributes_of_tensors_come_over():
    odd = torch.ones(3, requires_grad=True)
    odd.note = "kept"
    weight = torch.nn.Parameter(torch.ones(2))
    weight.note = odd
    for there, other in by_both([odd, weight]):
        assert there.note == "kept" and there.requires_grad and there.is_leaf
        assert type(other) is torch.nn.Parameter and other.note is there


def test_a_result_that_needs_a_gradient_comes_as_a_leaf():
    leaf = torch.ones(3, requires_grad=True)
    for there in by_both(leaf * 2):
        assert there.requires_grad and there.is_leaf and there.tolist() == [2, 2, 2]


def test_objects_arrays_and_modules():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    obj = {
        "pair": Pair(1, [torch.ones(2)]),
        "model": model,
        "array": np.arange(50_000),
        "few": np.ones(3),
        "none": None,
    }
    there = over(obj)
    assert type(there["pair"]) is Pair and there["pair"].left == 1 and there["none"] is None
    assert (there["array"] == np.arange(50_000)).all()
    there["few"][0] = 2
    pairs = zip(there["model"].parameters(), model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    scripted = over(torch.jit.script(torch.nn.Linear(2, 2)))
    assert scripted(torch.ones(2)).shape == (2,)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4).T,
        np.array(["a", None], dtype=object),
        np.arange(5, dtype=">i4"),
        np.ones(3, dtype="m8[s]"),
    ],
    ids=["strided", "objects", "big-endian", "timedelta"],
)
def test_arrays_of_other_kinds_go_by_pickle(array):
    content = codec.encode([array, torch.ones(2)])
    there, tensor = decoded(content)
    assert content.flags & codec.PICKLED and there.dtype == array.dtype and (there == array).all()
    assert tensor.tolist() == [1, 1]


def test_large_memory_is_not_copied():
    large, array = torch.zeros(100_000), np.zeros(100_000)
    addresses = {large.data_ptr(), array.ctypes.data}
    for obj in ([large, array], Other([large, array])):
        _, _, parts, _ = codec.encode(obj).body(None)
        own = {
            part.data_ptr() if isinstance(part, torch.Tensor) else address_of(part)
            for part in parts
        }
        assert len(own) == len(parts) == 2 and own == addresses


def address_of(part):
    return np.frombuffer(part, np.uint8).ctypes.data


def test_functions_without_a_name_travel_by_cloudpickle():
    step, shared, reference = 3, torch.ones(3), Marked(2)
    function, first, second, there = over([lambda x: x + step, shared, shared, reference])
    assert function(4) == 7 and first is second and there.number == 2


def test_what_cannot_be_pickled_raises_and_the_next_object_is_whole():
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("not this one")

    for encode in (
        codec.encode,
        lambda obj: encode_call(obj, {}),
        lambda obj: encode_call((), {"k": obj}),
    ):
        with pytest.raises(RuntimeError, match="not this one"):
            encode([torch.ones(3), Marked(1), Stubborn()])
        assert over([1, torch.ones(2)])[0] == 1


class Nested:
    """Encodes another object while it is encoded, as a call within ``__reduce__`` does."""

    def __reduce__(self):
        inside = codec.encode_pickled([torch.zeros(3), "inner"])
        assert len(inside.objects) == 1
        return bytes, (inside.skeleton,)


def test_encoding_within_encoding():
    content = codec.encode([torch.ones(2), Nested(), torch.ones(3)])
    assert [obj.shape for obj in content.objects] == [(2,), (3,)]
    there = decoded(content)
    assert there[0].shape == (2,) and there[2].shape == (3,)
    assert type(there[1]) is bytes


class Reading:
    """Decodes another object while it is decoded, as a call within ``__setstate__`` does."""

    def __init__(self):
        self.found = None

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.found = over(Other([Marked(9), torch.full((2,), 9.0)])).held

    def __reduce__(self):
        return Reading, (), {"any": 1}


def test_decoding_within_decoding():
    before, reading, after = over(
        [(Marked(1), torch.zeros(2)), Reading(), (Marked(3), torch.ones(2))]
    )
    assert reading.found[0].number == 9 and reading.found[1].tolist() == [9, 9]
    assert before[0].number == 1 and before[1].tolist() == [0, 0]
    assert after[0].number == 3 and after[1].tolist() == [1, 1]


def test_a_reference_travels_once_however_often_it_stands_there():
    for is_pickled in (False, True):
        reference, other = Marked(5), Marked(6)
        obj = [reference, [reference], other, torch.ones(1), reference]
        content = codec.encode(Other(obj) if is_pickled else obj)
        assert [one.number for one in content.references] == [5, 6]
        assert bool(content.flags & codec.PICKLED) == is_pickled
        there = decoded(content)
        there = there.held if is_pickled else there
        assert [there[0].number, there[2].number] == [5, 6] and there[0] is there[1][0] is there[4]


class Unreadable:
    """An object that raises when it is unpickled."""

    def __reduce__(self):
        return unreadable, ()


def unreadable():
    raise ValueError("unreadable")


def test_the_references_of_what_cannot_be_read_are_known_without_reading_it():
    for obj in ([Marked(7), Unreadable()], [Unreadable(), Marked(7)]):
        content = codec.encode(obj)
        assert [one.number for one in content.references] == [7]
        with pytest.raises(ValueError, match="unreadable"):
            decoded(content)


def test_attached_tensors_take_the_places_of_those_that_came():
    sparse = torch.eye(3).to_sparse()
    obj = [
        torch.ones(2),
        {"x": torch.ones(3)},
        np.ones(2),
        Marked(1),
        torch.nn.Parameter(torch.ones(1)),
        sparse,
        bytearray(b"b"),
    ]
    for whole, take in ((obj, lambda there: there), (Other(obj), lambda there: there.held)):
        came = []

        def attach(tensors, came=came):
            came += tensors
            return [tensor * 2 for tensor in tensors]

        there = take(over(whole, attach=attach))
        assert [type(one) for one in came] == [
            torch.Tensor,
            torch.Tensor,
            torch.nn.Parameter,
            torch.Tensor,
        ]
        assert came[3].layout is torch.sparse_coo
        assert there[0].sum() == 4 and there[1]["x"].sum() == 6 and there[4].sum() == 2
        assert there[5].to_dense().sum() == 6
        assert there[2].sum() == 2 and there[3].number == 1 and there[6] == b"b"
    assert over([np.ones(2), 1], attach=lambda tensors: 1 / 0)[1] == 1  # nothing to attach


def test_memory_of_other_objects_travels_out_of_band():
    class Sheet:
        """Exports its memory, as arrays of other libraries do."""

        def __init__(self, data):
            self.data = data

        def __reduce_ex__(self, protocol):
            return bytearray, (pickle.PickleBuffer(self.data),)

    tensor = torch.ones(20_000)
    content = codec.encode([Sheet(bytes(range(200)) * 100), tensor, Sheet(b"small")])
    flags, _, parts, _ = content.body(None)
    assert flags & codec.PICKLED and [memory_of(part).nbytes for part in parts] == [
        80_000,
        20_000,
        5,
    ]
    first, there, second = decoded(content)
    assert first == bytes(range(200)) * 100 and torch.equal(there, tensor) and second == b"small"


def test_every_truncation_is_refused():
    reference = Marked(1)
    contents = [
        codec.encode([torch.arange(9), torch.ones(100_000), 1, "text"]),
        codec.encode([reference, torch.ones(2)]),
        encode_call([1, torch.ones(3)], {"k": torch.zeros(2)}),
        codec.encode([1, 2.0, "three"]),
    ]
    for content in contents:
        flags, body, parts, _ = content.body(None)
        there = [memory_of(part) for part in parts]
        references = list(content.references)
        READER.decode(flags, bytearray(body), 0, there, references)
        for length in range(len(body)):
            with pytest.raises(FrameError):
                READER.decode(flags, bytearray(body[:length]), 0, there, references)
        for missing in range(len(parts)):
            with pytest.raises(FrameError):
                READER.decode(flags, bytearray(body), 0, there[:missing], references)
        if references:
            with pytest.raises(FrameError):
                READER.decode(flags, bytearray(body), 0, there, [])
        with pytest.raises(FrameError):
            READER.decode(flags, bytearray(body), 0, [*there, memoryview(b"more")], references)


def test_numbers_beyond_the_table_are_refused():
    one, two = torch.ones(1), torch.ones(2)
    flags, body, _, _ = codec.encode([one, two]).body(None)
    table = body[: len(body) - len(codec.encode([one, two]).skeleton)]
    for data in ([one, two, torch.ones(3)], [torch.ones(number) for number in range(5)]):
        content = codec.encode(data)
        with pytest.raises(FrameError):
            READER.decode(flags, bytearray(table + content.skeleton), 0, [])


def test_tensors_and_references_of_all_orders():
    met = [Marked(1), torch.ones(1), Marked(2), np.ones(2)]
    for order in itertools.permutations(range(4)):
        obj = [met[place] for place in order]
        assert described(over(obj)) == described(obj)
        args, _ = came_with(obj, {})
        assert described(list(args)) == described(obj)


def came_with(args, kwargs):
    content = encode_call(args, kwargs)
    return codec.arguments(content.flags, decoded(content))


def came(args, kwargs):
    content = encode_call(args, kwargs)
    flags, body, parts, _ = content.body(None)
    return codec.arguments(flags, READER.decode(flags, bytearray(body), 0, parts))


@pytest.mark.parametrize("kwargs", [None, {"last": 3}])
def test_arguments_from_an_iterator_come_with_what_only_pickle_carries(kwargs):
    args, found = came(iter([1, Pair(2, 3)]), kwargs)
    assert args == (1, Pair(2, 3)) and found == (kwargs or {})


class Named(str):
    """A string of a class of its own, such as a member of an enumeration."""


def test_names_of_arguments_may_be_of_a_class_of_their_own():
    assert came((1,), {Named("left"): 2}) == ((1,), {"left": 2})


@pytest.mark.parametrize("args", [(), (1,), (Pair(2, 3),)])
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"y": 1, 3: 4}, "of type str; got 3"),
        ({Named("y"): 1, None: 4}, "of type str; got None"),
        ([("y", 1)], "is a mapping"),
    ],
)
def test_what_cannot_be_keywords_is_refused_at_the_caller(args, kwargs, words):
    with pytest.raises(TypeError, match=words):
        encode_call(args, kwargs)


@pytest.mark.parametrize(
    ("encode", "place"),
    [
        (lambda big, reader: codec.encode(big, reader), "the result or value"),
        (lambda big, reader: codec.encode([1, big], reader), r"the result or value\[1\]"),
        (lambda big, reader: encode_call((1, big), {}, reader), "argument 'kwargs'"),
        (lambda big, reader: encode_call((), {"x": [big]}, reader), r"argument 'x'\[0\]"),
    ],
)
def test_bytes_too_long_for_data_are_pickled_or_refused(monkeypatch, encode, place):
    big, pickled = bytes(1 << 32), []
    # Not by pickle itself, which copies them.
    monkeypatch.setattr(codec, "encode_pickled", pickled.append)
    encode(big, None)
    assert len(pickled) == 1
    with pytest.raises(NotPlainData, match=rf"^{place}: bytes of 4\.0 GiB.*w reads data only"):
        encode(big, "w")
    assert len(pickled) == 1


def test_what_a_service_is_not_given_as_data_is_named():
    arguments = (1, 2, ("w0", "w1"), Other(3))
    name = callee.wire_name(worker_gather.put_part)[1]
    with pytest.raises(NotPlainData, match=r"^argument 'obj': "):
        codec.encode_function(worker_gather.put_part, name, arguments, {}, "w1")
    with pytest.raises(NotPlainData, match=r"^argument 'generation': "):
        codec.encode_function(worker_gather.put_part, name, (Other(3),), {}, "w1")
