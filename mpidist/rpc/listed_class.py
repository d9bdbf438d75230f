"""Methods of listed classes that other workers may call.

A method is admitted if a listed class defines it, under a public name or as ``__call__``. No code
of the class runs during the look-up: no ``__getattr__``, no property, no metaclass.
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

_PYBIND_METHOD = type(class_dicts.own(torch._C.Future)["wait"])  # pybind11 method
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

# The attribute of each wrapper type that holds the wrapped function.
_WRAPPERS = {
    staticmethod: "__func__",
    classmethod: "__func__",
    functools.partialmethod: "func",
    callee.CACHED_TYPE: "__wrapped__",
}

# Returns whether the list has a class, or one method of the class.
Lists = Callable[[type, str], bool]


def is_public(name: str) -> bool:
    """Return whether a name is public or ``__call__``."""
    return not name.startswith("_") or name == "__call__"


def methods_of(cls: type, lists: Lists) -> dict[str, object]:
    """Return the methods of a class that others may call, by name, not bound.

    Args:
        cls: A listed class.
        lists: Returns whether the list has a class, or one method of the class.
    """
    names = {
        name: None
        for base in class_dicts.mro(cls)
        for name in class_dicts.own(base)
        if type(name) is str
    }
    return {name: _attribute(cls, name) for name in names if complaint(cls, name, lists) == ""}


def complaint(cls: type, name: str, lists: Lists) -> str:
    """Return why a method of a listed class may not be called; an empty string if it may be."""
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


def bound(attribute: Any, value: object, cls: type) -> Any:
    """Bind a method to an instance, as Python does after attribute look-up."""
    return type(attribute).__get__(attribute, value, cls)


def class_methods(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the static and class methods that a class defines, by name, bound to the class."""
    for name, attribute in class_dicts.own(cls).items():
        if is_bound_to_classes(attribute) and is_public(name) and not _is_foreign(attribute, cls):
            yield name, bound(attribute, None, cls)


def is_bound_to_classes(attribute: object) -> bool:
    """Return whether an attribute is a static or class method."""
    return _is_one_of(attribute, _BOUND_TO_CLASSES)


def is_method(attribute: object) -> bool:
    """Return whether an attribute of a class is a method."""
    return _is_one_of(attribute, _METHODS)


def _is_one_of(attribute: object, kinds: tuple[type, ...]) -> bool:
    # By identity, not by "in": a metaclass may redefine equality.
    return any(type(attribute) is kind for kind in kinds)


def _attribute(cls: type, name: str) -> object:
    base = class_dicts.definer(cls, name)
    assert base is not None
    return class_dicts.own(base)[name]


def _is_foreign(attribute: object, cls: type) -> bool:
    """Return whether a method is another module's function, as in ``run = subprocess.run``."""
    function = attribute
    while type(function) in _WRAPPERS:
        function = getattr(function, _WRAPPERS[type(function)])
    if type(function) not in (FunctionType, BuiltinFunctionType):
        # Either a method of a C class, or a wrapper around a class, a property or an object.
        return function is not attribute
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or module == class_dicts.own(cls).get("__module__"):
        return False
    # A C function of another module is foreign; a Python function only if its module exports it.
    return type(function) is BuiltinFunctionType or (
        "." not in name and callee.is_found_at(function, module, name)
    )
