"""Attributes of classes, read without running their code; pure."""

import pytest

from mpidist.rpc.names import class_attributes


class Liar(type):
    """Metaclass whose attributes run code."""

    def __getattribute__(cls, name):
        raise AssertionError(f"{name} was asked of the class")


class Base:
    first = second = 1


class Lying(Base, metaclass=Liar):
    second = 2


def test_no_code_of_a_metaclass_runs():
    with pytest.raises(AssertionError):
        _ = Lying.second
    assert class_attributes.own(Lying)["second"] == 2
    assert class_attributes.mro(Lying) == (Lying, Base, object)
    assert class_attributes.is_below(Lying, Base) and not class_attributes.is_below(Base, Lying)
    assert class_attributes.name_of(Lying) == f"{__name__}.Lying"
    assert class_attributes.name_of(Lying, ":") == f"{__name__}:Lying"


def test_the_nearest_class_counts():
    found = class_attributes.attributes(Lying)
    assert (found["first"], found["second"]) == (1, 2)
    assert class_attributes.definer(Lying, "first") is Base
    assert class_attributes.definer(Lying, "second") is Lying
    assert class_attributes.definer(Lying, "third") is None


def test_a_module_that_is_no_string_is_not_used():
    assert class_attributes.name_of(type("Odd", (), {"__module__": 3})) == "?.Odd"
