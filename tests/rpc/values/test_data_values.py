"""Extension types of messages: references, names, workers, registered classes."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.serialization.data_format import NUMBER
from mpidist.errors import FrameError, NotPlainData
from mpidist.rpc.names.allowlist import Allowed, Refused
from mpidist.rpc.values import data_values
from mpidist.rpc.values.data_values import (
    NAMED,
    REFERENCE,
    REGISTERED,
    WORKER,
    ExtensionReader,
    ExtensionWriter,
    NotAReference,
)
from mpidist.rpc.values.pickles import Reference, Registered
from mpidist.rpc.worker import WorkerInfo


class Box(Registered):
    def __init__(self, *held):
        self.held = held

    def contents(self):
        return self.held


class Derived(Box):
    pass


ALLOWED = Allowed([Box, torch.add])


def read(code, values, allowed=ALLOWED, references=()):
    data = memoryview(values if isinstance(values, bytes) else b"")
    return ExtensionReader(references, allowed).extend(code, data, lambda data: list(values))


def there(obj):
    return read(*ExtensionWriter(True).extend(obj))


def test_each_reference_of_a_message_has_one_number():
    first, second, writer = Reference(), Reference(), ExtensionWriter(False)
    written = [writer.extend(one) for one in (first, second, first)]
    assert written == [(REFERENCE, NUMBER.pack(number)) for number in (0, 1, 0)]
    assert writer.references == [first, second]
    assert read(REFERENCE, NUMBER.pack(1), None, writer.references) is second
    for wrong in (NUMBER.pack(2), b"", b"\0" * 8):
        with pytest.raises(FrameError, match="beyond the 2 that came"):
            read(REFERENCE, wrong, ALLOWED, writer.references)


def test_a_message_that_may_be_a_pickle_has_references_alone():
    for obj in (torch.add, Box(1, 2), None):
        with pytest.raises(NotAReference):
            ExtensionWriter(False).extend(obj)
    with pytest.raises(FrameError, match="at a worker that reads pickles"):
        read(NAMED, ["torch.add"], None)
    assert ExtensionWriter(True).extend(Reference())[0] == REFERENCE


def test_listed_names_and_workers_come_over():
    assert there(torch.add) is torch.add and there(Box) is Box
    assert there(WorkerInfo("one", 3)) == WorkerInfo("one", 3)
    for obj in (torch.mul, Derived):
        with pytest.raises(Refused):
            there(obj)
    assert ExtensionWriter(True).extend(object()) is None
    with pytest.raises(NotPlainData, match="cannot be named"):
        ExtensionWriter(True).extend(lambda: None)


def test_a_registered_class_is_its_number_and_contents(monkeypatch):
    monkeypatch.setattr(data_values, "_registered", {})
    with pytest.raises(Refused, match="does not know"):
        read(REGISTERED, [5, 1])
    data_values.register_class(5, Box, lambda *held: Box(*held, "made"))
    assert ExtensionWriter(True).extend(Box(1, 2)) == (REGISTERED, [5, 1, 2])
    assert there(Box(1, 2)).held == (1, 2, "made")
    assert ExtensionWriter(True).extend(Derived(1)) is None  # subclasses are not included
    for values, error in (([6], Refused), (["5"], FrameError), ([True], FrameError)):
        with pytest.raises(error):
            read(REGISTERED, values)


@pytest.mark.parametrize(
    ("code", "values"),
    [
        (WORKER, ["one", True]),
        (NAMED, [1]),
        (99, []),
    ],
    ids=repr,
)
def test_values_of_another_form_are_an_error(code, values):
    with pytest.raises(FrameError):
        read(code, values)
