"""Extension types of data-only messages: references, names, records, errors, registered classes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mpidist.comm.serialization.data_format import NUMBER
from mpidist.errors import CommTimeout, FrameError, NotPlainData, RankFailureError
from mpidist.rpc.names.allowlist import Allowed, Refused
from mpidist.rpc.values import data_values
from mpidist.rpc.values.data_values import (
    ERROR,
    NAMED,
    RECORD,
    REFERENCE,
    REGISTERED,
    WORKER,
    ExtensionReader,
    ExtensionWriter,
    NotAReference,
    ReferenceWriter,
    error_values,
    make_error,
)
from mpidist.rpc.values.pickles import Reference, Registered
from mpidist.rpc.worker import WorkerInfo


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Complaint(Exception):
    def __init__(self, *args):
        super().__init__(*args)
        self.is_made = True


class Silent(Exception):
    def __str__(self):
        raise ZeroDivisionError


class Box(Registered):
    def __init__(self, *held):
        self.held = held

    def contents(self):
        return self.held


class Derived(Box):
    pass


ALLOWED = Allowed([Point, Complaint, torch.add])


def read(code, values, allowed=ALLOWED, references=()):
    data = memoryview(values if isinstance(values, bytes) else b"")
    return ExtensionReader(references, allowed).extend(code, data, lambda data: list(values))


def there(obj):
    return read(*ExtensionWriter().extend(obj))


def test_each_reference_of_a_message_has_one_number():
    first, second, writer = Reference(), Reference(), ReferenceWriter()
    written = [writer.extend(one) for one in (first, second, first)]
    assert written == [(REFERENCE, NUMBER.pack(number)) for number in (0, 1, 0)]
    assert writer.references == [first, second]
    assert read(REFERENCE, NUMBER.pack(1), None, writer.references) is second
    for wrong in (NUMBER.pack(2), b"", b"\0" * 8):
        with pytest.raises(FrameError, match="beyond the 2 that came"):
            read(REFERENCE, wrong, ALLOWED, writer.references)


def test_a_message_that_may_be_a_pickle_has_references_alone():
    for obj in (torch.add, Point(1, 2), None):
        with pytest.raises(NotAReference):
            ReferenceWriter().extend(obj)
    with pytest.raises(FrameError, match="at a worker that reads pickles"):
        read(NAMED, ["torch.add"], None)
    assert ExtensionWriter().extend(Reference())[0] == REFERENCE


def test_listed_names_records_and_workers_come_over():
    assert there(torch.add) is torch.add and there(Point) is Point
    assert there(Point(1, 2)) == Point(1, 2)
    assert there(WorkerInfo("one", 3)) == WorkerInfo("one", 3)
    for obj in (torch.mul, dataclasses.dataclass(type("Other", (), {}))):
        with pytest.raises((Refused, NotPlainData)):
            there(obj)
    assert ExtensionWriter().extend(object()) is None
    with pytest.raises(NotPlainData, match="cannot be named"):
        ExtensionWriter().extend(lambda: None)


def test_a_registered_class_is_its_number_and_contents(monkeypatch):
    monkeypatch.setattr(data_values, "_registered", {})
    with pytest.raises(Refused, match="does not know"):
        read(REGISTERED, [5, 1])
    data_values.register_class(5, Box, lambda *held: Box(*held, "made"))
    assert ExtensionWriter().extend(Box(1, 2)) == (REGISTERED, [5, 1, 2])
    assert there(Box(1, 2)).held == (1, 2, "made")
    assert ExtensionWriter().extend(Derived(1)) is None  # subclasses are not included
    for values in ([], ["5"], [True], [6]):
        with pytest.raises(Refused):
            read(REGISTERED, values)


@pytest.mark.parametrize(
    ("code", "values"),
    [
        (WORKER, ["one", True]),
        (WORKER, [1, 1]),
        (NAMED, [1]),
        (RECORD, [None]),
        (99, []),
        (ERROR, ["builtins:ValueError", "text", [1], {}]),
        (ERROR, ["builtins:ValueError", "text", (), {1: 2}]),
        (ERROR, ["builtins:ValueError", None, (), {}]),
        (ERROR, ["builtins:UnicodeDecodeError", "", ("utf-8", b"a", 0, 2, "why"), {}]),
        (ERROR, ["builtins:UnicodeDecodeError", "", ("utf-8", "a", 0, 1, "why"), {}]),
        (ERROR, ["builtins:UnicodeTranslateError", "", ("a", -1, 1, "why"), {}]),
    ],
    ids=repr,
)
def test_values_of_another_form_are_an_error(code, values):
    with pytest.raises(FrameError):
        read(code, values)


def test_errors_come_over_as_what_they_are():
    lost = there(RankFailureError("gone", (1, 2)))
    assert type(lost) is RankFailureError and str(lost) == "gone" and lost.ranks == (1, 2)
    missing = there(FileNotFoundError(2, "No such file", "a/b"))
    assert type(missing) is FileNotFoundError and missing.filename == "a/b"
    assert type(there(CommTimeout("late"))) is CommTimeout
    own = there(Complaint(1, "two"))
    # No constructor of a user's class runs.
    assert type(own) is Complaint and own.args == (1, "two") and not hasattr(own, "is_made")
    assert type(there(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"))) is UnicodeDecodeError
    syntax = there(SyntaxError("bad", ("file", 1, 10**9, "text")))
    assert syntax.args == (str(SyntaxError("bad", ("file", 1, 10**9, "text"))),)
    with pytest.raises(Refused, match=r"exceptions of .*Silent"):
        there(Silent())


def test_arguments_that_are_no_data_are_the_errors_text():
    name, text, arguments, attributes = error_values(ValueError("a", object()))
    assert name == "builtins:ValueError" and arguments == (text,) and attributes == {}
    assert error_values(ValueError(torch.ones(1)))[2] == ("tensor([1.])",)
    assert error_values(Silent())[1:3] == ("(its text raised ZeroDivisionError)", ())
    failed = CommTimeout("late")
    failed.shown, failed._own, failed.held = 1, 2, object()
    assert error_values(failed)[3] == {"shown": 1}
    assert make_error(error_values(failed), ALLOWED).shown == 1
