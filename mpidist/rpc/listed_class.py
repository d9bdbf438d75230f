"""Methods of listed classes: which of a class's attributes others may call.

A method is admitted that a listed class itself defines, under a public name or as ``__call__``. The
class is read, and nothing of it is run: no ``__getattr__``, no property, no metaclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from mpidist.rpc import callee, class_dicts

_PYBIND_METHOD = type(class_dicts.own(torch._C.Future)["wait"])  # methods of classes of pybind11
_BOUND_TO_CLASSES = (staticmethod, classmethod, ClassMethodDescriptorType)
_METHODS = (
    FunctionType,
    callee.CACHED_TYPE,
    functools.partialmethod,
    functools.singledispatchmethod,
    MethodDescriptorType,
    WrapperDescriptorType,
    _PYBIND_METHOD,
    *_BOUND_TO_CLASSES,
)

# Where wrappers keep what they wrap.
_WRAPPERS = {
    staticmethod: "__func__",
    classmethod: "__func__",
    functools.partialmethod: "func",
    callee.CACHED_TYPE: "__wrapped__",
}

Lists = Callable[[type, str], bool]  # whether the list has a class, or this method of it


def is_public(name: str) -> bool:
    """Say whether a name is one that others may call."""
    return not name.startswith("_") or name == "__call__"


def methods_of(cls: type, lists: Lists) -> dict[str, Any]:
    """Return the methods of a class's instances that others may call: attributes of classes, by name.

    Args:
        cls: A listed class.
        lists: Says whether the list has a class, or one method of it.
    """
    names = {
        name: None
        for base in class_dicts.mro(cls)
        for name in class_dicts.own(base)
        if type(name) is str
    }
    return {name: _attribute(cls, name) for name in names if complaint(cls, name, lists) == ""}


def complaint(cls: type, name: str, lists: Lists) -> str:
    """Return why a method of a listed class may not be called; an empty text if it may."""
    if not is_public(name):
        return "this worker allows public methods only"
    base = class_dicts.definer(cls, name)
    if base is None:
        return "the class has no such method"
    if not lists(base, name):
        own = class_dicts.name_of(base)
        return (
            f'it is inherited from "{own}", which is not in the list ("{own}.{name}" admits '
            f'this method, "{own}" all of them)'
        )
    attribute = class_dicts.own(base)[name]
    if not is_method(attribute):
        return f"it is of type {type(attribute).__qualname__} and not a method"
    if _is_foreign(attribute, base):
        return "it is a function of another module, or no function at all"
    return ""


def bound(attribute: Any, value: Any, cls: type) -> Any:
    """Bind a method to an instance, as Python does it once it has found the attribute."""
    return type(attribute).__get__(attribute, value, cls)


def class_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the static and class methods that a class itself defines, by name, bound to it."""
    for name, attribute in class_dicts.own(cls).items():
        if is_bound_to_classes(attribute) and is_public(name) and not _is_foreign(attribute, cls):
            yield name, bound(attribute, None, cls)


def is_bound_to_classes(attribute: Any) -> bool:
    """Say whether an attribute is a static or a class method."""
    return _is_one_of(attribute, _BOUND_TO_CLASSES)


def is_method(attribute: Any) -> bool:
    """Say whether an attribute of a class is a method."""
    return _is_one_of(attribute, _METHODS)


def _is_one_of(attribute: Any, kinds: tuple[type, ...]) -> bool:
    # Not by "in": a metaclass may define what equal means.
    return any(type(attribute) is kind for kind in kinds)


def _attribute(cls: type, name: str) -> Any:
    base = class_dicts.definer(cls, name)
    assert base is not None
    return class_dicts.own(base)[name]


def _is_foreign(attribute: Any, cls: type) -> bool:
    """Say whether a method is what another module offers as its function: ``run = subprocess.run`` in the class's body."""
    function = attribute
    while type(function) in _WRAPPERS:
        function = getattr(function, _WRAPPERS[type(function)])
    if type(function) not in (FunctionType, BuiltinFunctionType):
        # A method of a C class; or a class, a property, a callable object within a wrapper.
        return function is not attribute
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or module == class_dicts.own(cls).get("__module__"):
        return False
    # C functions are at home where they are, Python's where their module shows them.
    return type(function) is BuiltinFunctionType or (
        "." not in name and callee.is_found_at(function, module, name)
    )
