"""The codec for workers with a list: round trips, errors of callers, refusals of receivers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mpidist.comm.serialization.data_writer import Ext, encode
from mpidist.errors import (
    CommTimeout,
    FrameError,
    MpidistError,
    NotPlainData,
    RankFailureError,
    RemoteError,
)
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed, Refused
from mpidist.rpc.values import codec, data_values, remote_error
from mpidist.rpc.worker import WorkerInfo
from tests.comm.serialization.test_data_format import DATA, typed_repr
from tests.rpc.round_trips import Marked, decoded, described


class Pair(NamedTuple):
    first: object
    second: object


class Complaint(Exception):
    pass


class Other:
    pass


def step(weights, rate=0.1, *rest, **options):
    return weights


READER = codec.Decoder(Allowed([step, Pair, torch.add, torch.ops.aten.mul, "aten::mul.Tensor"]))
WORKER = WorkerInfo("worker1", 1)


def written(obj):
    return codec.encode(obj, "worker1")


def over(obj):
    return decoded(written(obj), reader=READER)


def called(*args, **kwargs):
    name = callee.wire_name(step)[1]
    content = codec.encode_function(step, name, args, kwargs, "worker1")
    flags, body, _, _ = content.body(None)
    data = decoded(content, reader=READER)
    return ((), {}) if not body else codec.arguments(flags, data)


@settings(max_examples=100, deadline=None)
@given(DATA)
def test_results_come_back_exactly(obj):
    assert typed_repr(over(obj)) == typed_repr(obj)


@settings(max_examples=100, deadline=None)
@given(DATA, DATA)
def test_arguments_come_back_exactly(first, second):
    assert typed_repr(called(first, rate=second)) == typed_repr(([first], {"rate": second}))
    assert called() == ((), {})


def test_tensors_arrays_and_references():
    tensor, parameter = (
        torch.arange(6.0).view(2, 3),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    )
    sparse = torch.eye(3).to_sparse()
    data = {
        "a": [tensor, tensor.t(), tensor.expand(4, 2, 3)],
        "b": (np.arange(3)[::2], parameter, bytearray(b"x")),
        "c": sparse,
    }
    back = over([Marked(3), data, Marked(4)])
    assert back[0].number == 3 and back[2].number == 4
    assert described(back[1]["a"]) == described(data["a"]) and described(back[1]["b"]) == described(
        data["b"]
    )
    assert torch.equal(back[1]["c"].to_dense(), torch.eye(3))
    one = Marked(5)
    assert over([one, one])[0].number == 5
    assert torch.equal(over(tensor), tensor) and torch.equal(called(tensor)[0][0], tensor)
    large = torch.arange(100_000.0)
    assert torch.equal(called(large, rate=large)[1]["rate"], large)


def test_arguments_of_usual_kinds_are_written_as_all_others_are():
    small, large = torch.arange(3.0), torch.arange(20_000.0)
    one = Marked(1)
    for args in (
        (one, small),
        (small, one, 3, "x", small.clone(), Marked(2)),
        (one, one),
        (small, small),
        (one, large),
        (small[:2], small[1:]),
        tuple(Marked(number) for number in range(9)),
        tuple(torch.ones(1) for _ in range(9)),
        (one, 1 << 70, "\ud800"),
        (one, small.expand(2, 3), small.to_sparse(), torch.nn.Parameter(small)),
    ):
        back = over(list(args))
        if args[1] is not one and type(args[-2]) is not torch.Tensor:
            assert [described(item) for item in back] == [described(item) for item in args]
        assert [type(item) for item in back] == [type(item) for item in args]
        back, _ = called(*args)
        assert [repr(item) if type(item) is not Marked else item.number for item in back] == [
            repr(item.clone() if type(item) is torch.Tensor else item)
            if type(item) is not Marked
            else item.number
            for item in args
        ]


def test_listed_classes_and_functions():
    named = [step, Pair, torch.add, torch.ops.aten.mul, torch.ops.aten.mul.Tensor]
    assert over(named) == named
    assert over(WORKER) == WORKER


@pytest.mark.parametrize("obj", [Other, print, [Allowed]])
def test_unlisted_names_are_refused_at_the_receiver(obj):
    with pytest.raises(Refused, match="not in the list"):
        decoded(written(obj), reader=READER)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: called(1, Other()), "argument 'rate'"),
        (lambda: called(1, 2, 3, {"x": [Other()]}), r"argument 3\['x'\]\[0\]"),
        (lambda: called(weights=[Other()]), r"argument 'weights'\[0\]"),
        (lambda: called(1, Other(), rate=1), "argument 'rate'"),
        (lambda: called(1, option=Other()), "argument 'option'"),
        (lambda: called(lambda: 1), "argument 'weights'"),
        (
            lambda: called(torch.nn.Linear(1, 1)),
            "argument 'weights': a torch.nn.modules.linear.Linear",
        ),
    ],
)
def test_what_is_no_data_fails_at_the_caller_with_the_arguments_name(call, name):
    with pytest.raises(NotPlainData, match=f"^{name}.*worker1 reads data only"):
        call()


def test_what_is_nearly_data_is_refused_with_the_reason():
    for obj, words in (
        (Pair(1, 2), "a .*Pair is no plain data"),
        (ValueError("text"), "a ValueError is no plain data"),
        (np.array(["a"]), "array of dtype <U1"),
        (torch.ones(1, device="meta"), "on meta"),
        (lambda: 1, "cannot be named: it is not found"),
    ):
        with pytest.raises(NotPlainData, match=words):
            written(obj)
    deep = []
    for _ in range(300):
        deep = [deep, 1]
    with pytest.raises(NotPlainData) as caught:
        written([deep])
    assert len(str(caught.value)) < 500


def test_functions_without_a_name_fail_at_the_caller():
    with pytest.raises(NotPlainData, match="no importable name"):
        codec.encode_function(lambda: 1, b"\0\0", (), {}, "worker1")
    with pytest.raises(NotPlainData, match=r"^argument 1:"):
        codec.encode_function(
            callee.method("get"), b"\3\0get", (Marked(1), 2, Other()), {}, "worker1"
        )


def read(data, flags=0, references=()):
    return READER.decode(flags, bytearray(data), 0, [], references)


def test_a_pickle_is_refused_before_it_is_read():
    flags, body, _, _ = codec.encode_pickled(Other()).body(None)
    with pytest.raises(Refused, match="pickle"):
        READER.decode(flags, bytearray(body), 0, [])


@pytest.mark.parametrize(
    "values",
    [
        Ext(data_values.REFERENCE, b"\0\0\0\0"),
        Ext(data_values.REFERENCE, b"\xff\xff\xff\xff"),
        Ext(data_values.REFERENCE, b"\0"),
        Ext(data_values.REFERENCE, b""),
        Ext(data_values.NAMED, encode([1])),
        Ext(data_values.NAMED, encode(["os:system"])),
        Ext(data_values.NAMED, encode([f"{__name__}:step.__globals__"])),
        Ext(data_values.NAMED, encode([f"{__name__}:Pair.__init__"])),
        Ext(data_values.WORKER, encode(["a", "b"])),
        Ext(data_values.WORKER, encode(["a name that is none", 1])),
        Ext(data_values.REGISTERED, encode([])),
        Ext(data_values.REGISTERED, encode([10_000])),
        Ext(data_values.REGISTERED, encode([[]])),
        Ext(99, encode([])),
    ],
)
def test_forged_values(values):
    with pytest.raises((FrameError, Refused, MpidistError)):
        read(encode(values))


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        (0, {"a": 1}),
        (0, 3),
        (0, "abc"),
        (codec.KEYWORDS, []),
        (codec.KEYWORDS, [1, 2]),
        (codec.KEYWORDS, [["a", "b"], 1]),
        (codec.KEYWORDS, [["a", "a"], 1, 2]),
        (codec.KEYWORDS, [[1], 2]),
    ],
)
def test_forged_arguments(flags, data):
    with pytest.raises(FrameError):
        codec.arguments(flags, data)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def carried_error(error):
    description = over(remote_error.describe(raised(error), as_data=True))
    return remote_error.rebuild(description, WORKER, is_data_only=True)


def test_exceptions_of_python_and_of_mpidist_arrive_as_what_they_are():
    for error in (ValueError("x"), KeyError("k", 2), CommTimeout("late"), OSError(2, "no such")):
        back = carried_error(error)
        assert type(back) is type(error) and back.args == error.args
        assert isinstance(back.__cause__, remote_error.RemoteTraceback)
        assert "test_data_only" in str(back.__cause__)
    assert carried_error(ValueError(Other)).args[0].startswith("<class")
    missing = carried_error(FileNotFoundError(2, "no such", "path.txt"))
    assert str(missing) == "[Errno 2] no such: 'path.txt'" and missing.filename == "path.txt"
    assert carried_error(RankFailureError("gone", [1, 2])).ranks == (1, 2)


def test_other_exceptions_arrive_as_remote_errors():
    """Those of the user, and those that trust their arguments when they become text."""
    for error in (
        Complaint("what it says"),
        UnicodeDecodeError("utf8", b"abc", 1, 2, "what it says"),
        SyntaxError("what it says", ("f", 1, 1, "aaa", 1, 10**6)),
        KeyboardInterrupt("what it says"),
    ):
        back = carried_error(error)
        assert type(back) is RemoteError and "what it says" in str(back)
        assert back.type_name == type(error).__name__


@pytest.mark.parametrize(
    "forged", [None, 1, (), ("a", "b", "c"), ("a", 1, "c", None), ["a", "b", "c", None]]
)
def test_forged_descriptions(forged):
    with pytest.raises(FrameError, match="description of an exception"):
        remote_error.rebuild(forged, WORKER, is_data_only=True)


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n.",
        ("builtins:SystemExit", (), {}),
        ("builtins:eval", ("1",), {}),
        ("builtins:UnicodeDecodeError", ("utf8", b"abc", -(1 << 50), 4, "r"), {}),
        ("builtins:ValueError", 1, {}),
        ("builtins:ValueError", (), 1),
        ("builtins:ValueError",),
        (["builtins:ValueError"], (), {}),
    ],
    ids=repr,
)
def test_a_forged_content_of_a_description_is_a_remote_error(content):
    error = remote_error.rebuild(("Error", "x", "text", content), WORKER, is_data_only=True)
    assert type(error) is RemoteError


def test_decoders_for_data_and_for_pickles_agree_on_calls():
    content = codec.encode_function(step, callee.wire_name(step)[1], (1, [2]), {"rate": 3})
    flags, _, _, _ = content.body(None)
    args, kwargs = codec.arguments(flags, decoded(content))
    assert (list(args), kwargs) == called(1, [2], rate=3)
