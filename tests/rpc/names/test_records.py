"""Records: sent by fields, and rebuilt without running code of their classes."""

from __future__ import annotations

import dataclasses
import functools
import sys

import pytest

from mpidist.errors import FrameError
from mpidist.rpc.names import records
from tests.rpc import listed_module as module

NAME = module.__name__


@pytest.fixture(autouse=True)
def ran():
    module.ran.clear()
    return module.ran


def over(obj):
    """Take a record apart, and make it anew."""
    name, values = records.fields_of(obj)
    assert name == f"{NAME}:{type(obj).__qualname__}"
    return records.make_record(type(obj), values)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: module.Point(1), [1, 2.0]),
        (lambda: module.PointIn3(1, 3.0, 4), [1, 3.0, 4]),
        (lambda: module.Undecorated(1), [1, 2.0]),
        (lambda: module.Frozen(1, [2]), [1, [2]]),
        (lambda: module.FrozenHeir(1, [2], "more"), [1, [2], "more"]),
        (lambda: module.Various(given=3, kind="k"), ["k", 6, 7]),
        (lambda: module.Pair(1), [1, "r"]),
        (lambda: module.PairHeir(1, "x"), [1, "x"]),
        (lambda: module.Triple(1, 2, 3), [1, 2, 3]),
        (lambda: module.Setting(1), [1]),
        (lambda: module.WithHiddenSlot(1), [1]),
        (lambda: module.EqualToPoint("x"), ["x"]),
        (lambda: module.OfUnhashableClass(1), [1]),
    ],
)
def test_fields_travel_and_no_code_of_the_class_runs(make, values, ran):
    obj = make()
    ran.clear()
    assert records.fields_of(obj)[1] == values
    made = over(obj)
    assert ran == []
    assert type(made) is type(obj) and made == obj and repr(made) == repr(obj)


def test_values_are_not_copied_and_not_checked():
    tags = object()
    made = records.make_record(module.Frozen, ["no int", tags])
    assert made.x == "no int" and made.tags is tags
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.x = 1


def test_cached_properties_are_not_sent():
    obj = module.Various(given=3, kind="k")
    assert obj.costly == 7
    made = over(obj)
    assert "costly" not in vars(made) and made.costly == 7


class Unset:
    """Makes records that are incomplete, or more than their fields."""

    @staticmethod
    def without_a_field():
        obj = module.PointIn3(1)
        del obj.x
        return obj

    @staticmethod
    def slot_without_value():
        return object.__new__(module.Frozen)

    @staticmethod
    def with_an_attribute():
        obj = module.Point(1)
        obj.more = 1
        return obj

    @staticmethod
    def tuple_with_an_attribute():
        obj = module.PairHeir(1)
        obj.more = 1
        return obj

    @staticmethod
    def tuple_of_another_length():
        return tuple.__new__(module.Pair, (1, 2, 3))

    @staticmethod
    def with_a_hidden_slot():
        obj = module.WithHiddenSlot(1)
        obj.secret = 1
        return obj

    @staticmethod
    def of_a_local_class():
        @dataclasses.dataclass
        class Local:
            x: int = 1

        return Local()

    @staticmethod
    def of_a_replaced_class():
        copy = type("Point", (module.Point,), {"__module__": NAME, "__qualname__": "Point"})
        return copy(1)


NO_RECORDS = [
    *(function() for name, function in vars(Unset).items() if isinstance(function, staticmethod)),
    module.WithMore(1),
    module.OfDict(),
    module.OfError(),
    module.Guarded(),
    module.Server(),
    module.Point,
    module.Ends(),
    (1, 2),
    [1],
    {"x": 1},
    None,
    sys.version_info,
    functools.partial(print),
]


@pytest.mark.parametrize("obj", NO_RECORDS, ids=lambda obj: type(obj).__qualname__)
def test_what_would_arrive_incomplete_is_no_record(obj, ran):
    ran.clear()
    assert records.fields_of(obj) is None
    assert ran == []


@pytest.mark.parametrize(
    "cls",
    [module.OfDict, module.OfError, module.Guarded, module.Server, int, tuple, dict, object, type],
)
def test_other_classes_are_not_made(cls, ran):
    assert not records.is_record(cls)
    with pytest.raises(FrameError, match="neither a dataclass nor a named tuple"):
        records.make_record(cls, [1])
    assert ran == []


@pytest.mark.parametrize("cls", [module.Closing, module.ClosingHeir, module.ClosingPair])
def test_a_class_with_a_finalizer_has_no_records(cls, ran):
    assert not records.is_record(cls)
    with pytest.raises(FrameError, match="has __del__, which would run with fields"):
        records.make_record(cls, ["/etc/passwd"])
    assert ran == []
    obj = cls("mine")
    assert records.fields_of(obj) is None and "has __del__" in records.complaint(obj)


@pytest.mark.parametrize("cls", [module.Point, module.Frozen, module.Pair, module.Triple])
@pytest.mark.parametrize("values", [[], [1], [1, 2, 3, 4]])
def test_the_number_of_values_is_checked(cls, values):
    with pytest.raises(FrameError, match=f"has [23] fields; the message has {len(values)} values"):
        records.make_record(cls, values)


def test_abstract_classes_have_no_instances():
    import abc

    @dataclasses.dataclass
    class Abstract(abc.ABC):
        x: int

        @abc.abstractmethod
        def step(self):
            """Do nothing."""

    with pytest.raises(FrameError, match="has no instances"):
        records.make_record(Abstract, [1])


def test_a_class_without_fields_is_a_record():
    @dataclasses.dataclass
    class Empty:
        pass

    assert isinstance(records.make_record(Empty, []), Empty)
