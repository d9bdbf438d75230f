"""Attacks by methods of referenced values: names other than listed public methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mpidist.rpc as rpc
from mpidist.rpc.rref import Proxy
from tests.rpc.attacks import victim
from tests.rpc.attacks.attacker import Attacker, Attacks

attack = Attacks()

REFUSED = "may not be called|not in the list"

_OF_A_LISTED_CLASS = {
    "property_": ("A property of a listed class", "price"),
    "hidden": ("A private method", "_hidden"),
    "inherited": ("A method inherited from a class that is not listed", "inherited"),
    "class_": ("__class__", "__class__"),
    "init": ("__init__ again", "__init__"),
    "reduce": ("__reduce__", "__reduce__"),
    "reduce_ex": ("__reduce_ex__", "__reduce_ex__"),
    "get_attribute": ("__getattribute__", "__getattribute__"),
    "set_attribute": ("__setattr__", "__setattr__"),
    "delete_attribute": ("__delattr__", "__delattr__"),
    "directory": ("__dir__", "__dir__"),
    "size_of": ("__sizeof__", "__sizeof__"),
    "subclass_hook": ("A class method of object", "__subclasshook__"),
    "call": ("__call__ of a class without one", "__call__"),
    "data": ("A plain attribute", "value"),
    "absent": ("Nothing of that name", "nothing"),
    "dotted": ("A path", "get.__globals__"),
    "nul": ("A NUL behind the name", "get\0"),
    "cyrillic": ("A letter that looks the same", "g\u0435t"),
    "module": ("The name of its module", "__module__"),
    "dictionary": ("Its __dict__", "__dict__"),
}


def _note(name: str, idea: str, make: Callable[[Attacker], Any], method: str, *args: Any) -> None:
    def run(attacker: Attacker) -> object:
        # Not getattr: the proxy has dunders of its own.
        return Proxy.__getattr__(make(attacker).rpc_sync(timeout=5), method)(*args)

    run.__name__ = name
    attack(idea, REFUSED)(run)


def _box(attacker: Attacker) -> Any:
    return rpc.remote(attacker.to, victim.Box, args=(1,))


def _bird(attacker: Attacker) -> Any:
    return rpc.remote(attacker.to, victim.bird)


def _value(value: Any) -> Callable[[Attacker], Any]:
    return lambda attacker: rpc.remote(attacker.to, victim.echo, args=(value,))


for _name, (_idea, _method) in _OF_A_LISTED_CLASS.items():
    _note(_name, _idea, _box, _method)
_note("unlisted", "A method of an instance of an unlisted class", _bird, "sing")
_note("unlisted_property", "A property of an unlisted class", _bird, "song")
_note("unlisted_any", "Any attribute, by an unlisted class's __getattr__", _bird, "whatever")
_note("unlisted_call", "The call of an unlisted value", _bird, "__call__")
_note("of_tuple", "A method of a builtin type", _value(1), "count", 1)
_note(
    "of_tensor",
    "A method of a tensor",
    lambda attacker: rpc.remote(attacker.to, torch.add, args=(torch.ones(1), 1)),
    "add_",
    1,
)
_note(
    "of_exception",
    "A method of an exception",
    lambda attacker: rpc.remote(attacker.to, victim.error_of, args=(1,)),
    "add_note",
    "x",
)
_note(
    "of_record",
    "A method of a named tuple that tuple defines",
    lambda a: rpc.remote(a.to, victim.Pair, args=(1, 2)),
    "index",
    1,
)
_note(
    "of_record_replace",
    "A private method of a named tuple",
    lambda a: rpc.remote(a.to, victim.Pair, args=(1, 2)),
    "_replace",
)


@attack("The question for an attribute runs an unlisted class's __getattr__", "")
def has_attribute(attacker: Attacker) -> None:
    try:
        _bird(attacker).remote(timeout=5).not_there().to_here()
    except Exception:
        return
    raise AssertionError("a method that is not there was called")


@attack("The question for an attribute runs a property", "")
def has_property(attacker: Attacker) -> None:
    try:
        _bird(attacker).remote(timeout=5).song().to_here()
    except Exception:
        return
    raise AssertionError("a property was called")


@attack(
    "A method of a value whose creation failed",
    "ZeroDivisionError|TypeError|may not be called|not in the list",
)
def of_failed(attacker: Attacker) -> object:
    return rpc.remote(attacker.to, victim.Box, args=(1, 2, 3)).rpc_sync(timeout=5).get()
