"""Entries of an allowlist: the user's items, resolved to names and objects once, at ``init_rpc``.

Every name that a message may use later has its own entry. A function that a second module exports
has an entry under both names; a class has entries for its constructor and its static and class
methods; a module, for the functions that it defines.

A method of an instance is admitted if a listed class defines it, under a public name or as
``__call__``. No code of the class runs during the look-up: no ``__getattr__``, no property, no
metaclass.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from mpidist.errors import MpidistError
from mpidist.rpc.message import COUNT, Kind
from mpidist.rpc.names import callee, class_attributes

OWN_ENTRIES = ("mpidist.optim.local", "mpidist.nn.remote.execute")
_FUNCTIONS = (*callee.NAMED_TYPES, torch.jit.ScriptFunction)
_OPERATORS = (OpOverload, OpOverloadPacket)
_NAMESPACE = re.compile(r"(\w+)::\*", re.ASCII)
_OF_FILES = "from_file"  # accesses files: admitted only by its own name
_PYBIND_METHOD = type(class_attributes.own(torch._C.Future)["wait"])  # pybind11 method
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A name, and its object.

    Attributes:
        kind: The kind of call: ``CALL_PYTHON``, ``CALL_BUILTIN`` or ``CALL_SCRIPT``.
        name: The name in messages.
        target: A function, a class or an operator; None for an operator of a listed namespace,
            which is resolved at its first call.
        owner: For a single method, its class.
    """

    kind: int
    name: str
    target: object
    owner: type | None = None


def entries_of(item: object) -> list[Entry]:
    """Return the entries of one item of a list.

    Args:
        item: A function, class, module, operator, script function, or a name of one of these.

    Raises:
        TypeError: An item of another kind.
        ValueError: A name that does not exist, an object without an importable name, or an internal
            of mpidist.
    """
    if type(item) is str:
        return list(_of_text(item))
    if isinstance(item, _OpNamespace):
        return list(_of_namespace(item.__name__.rpartition(".")[2]))
    if isinstance(item, ModuleType):
        return list(_of_module(item, item.__name__))
    if type(item) in _OPERATORS or isinstance(item, torch.jit.ScriptFunction):
        return list(_of_function(item))
    if not isinstance(item, (*_FUNCTIONS, MethodType, type)):
        raise TypeError(f"allowed names functions, classes and modules; got {item!r}")
    module, name = callee.module_and_name(item)
    if not callee.is_found_at(item, module, name):
        if callee.wire_name(item)[1] != callee.UNNAMED:
            return list(_of_function(item))  # of torch, without module
        raise ValueError(
            f"allowed: {item!r} is not found by a name of its module, so no message can name it"
        )
    return list(_of_path(f"{module}.{name}", sys.modules[module], name.split(".")))


def display_name(item: object) -> str:
    """Return an item as text."""
    if type(item) is str:
        return item
    if isinstance(item, ModuleType):
        return item.__name__
    kind, name = callee.wire_name(item)
    text = name[COUNT.size :].decode()
    return text.replace(":", ".") if kind == Kind.CALL_PYTHON else text


def _of_text(text: str) -> Iterator[Entry]:
    path, is_module = (text[:-2], True) if text.endswith(".*") else (text, False)
    if path.startswith("torch.ops."):
        namespace, _, name = path.removeprefix("torch.ops.").partition(".")
        text = f"{namespace}::{name or '*'}"
    if "::" in text:
        yield from _of_operators(text)
        return
    if path in _namespaces() and importlib.util.find_spec(path) is None:
        yield from _of_namespace(path)
        return
    if path.startswith("__torch__."):
        function = torch.jit._state._python_cu.find_function(path)
        if function is None:
            raise ValueError(f'allowed: there is no script function "{text}" here')
        yield Entry(int(Kind.CALL_SCRIPT), path, function)
        return
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError(
            f'allowed: "{text}" is no name of a function, a class, a module or an operator'
        )
    if path not in OWN_ENTRIES:
        _refuse_own(text, path)
    holder, rest = _module_of(text, parts)
    if not rest:
        yield from _of_module(holder, text)
    elif is_module:
        raise ValueError(f'allowed: "{text}": "{path}" is no module')
    else:
        yield from _of_path(text, holder, rest)


def _module_of(text: str, parts: list[str]) -> tuple[ModuleType, list[str]]:
    """Return the innermost module of a dotted path, and the remaining names."""
    try:
        found = sys.modules.get(parts[0]) or importlib.import_module(parts[0])
        for index, part in enumerate(parts[1:], 1):
            there = getattr(found, part, None)
            if there is None:
                there = importlib.import_module(f"{found.__name__}.{part}")
            if not isinstance(there, ModuleType):
                return found, parts[index:]
            found = there
    except Exception as error:
        raise ValueError(f'allowed: "{text}" leads nowhere: {error}') from error
    return found, []


def _of_module(module: ModuleType, text: str) -> Iterator[Entry]:
    if module is torch:
        # Functions of tensors only: others configure this process or load programs.
        names = [
            name
            for name in dir(torch._C._VariableFunctions)
            if not name.startswith("_") and name != _OF_FILES
        ]
        names = [name for name in names if type(vars(torch).get(name)) is BuiltinFunctionType]
        yield from (
            Entry(int(Kind.CALL_BUILTIN), f"torch.{name}", vars(torch)[name]) for name in names
        )
        return
    if module.__name__ not in OWN_ENTRIES:
        _refuse_own(text, module.__name__)
    found = [
        (name, function)
        for name, function in vars(module).items()
        if _is_public(name) and _is_function(function) and _home_of(function) == module.__name__
    ]
    if not found:
        raise ValueError(
            f'allowed: "{text}" defines no public function; its classes are listed one by one'
        )
    for name, function in found:
        yield Entry(int(Kind.CALL_PYTHON), f"{module.__name__}:{name}", function)
        yield from _of_function(function)


def _of_path(text: str, module: ModuleType, path: list[str]) -> Iterator[Entry]:
    """Yield the entries of a name within a module, under that name and the object's own name."""
    found: Any = getattr(module, path[0], None)
    raw: Any = found
    owner: type | None = None
    for part in path[1:]:
        owner = class_attributes.definer(found, part) if isinstance(found, type) else None
        if owner is None:
            raise ValueError(f'allowed: "{text}" leads nowhere: there is no {part!r} in {found!r}')
        raw = class_attributes.own(owner)[part]
        found = bound(raw, None, found) if _is_bound_to_classes(raw) else raw
    is_own = f"{module.__name__}.{'.'.join(path)}" in OWN_ENTRIES
    name = f"{module.__name__}:{'.'.join(path)}"
    if owner is not None and not isinstance(found, type):
        if not _is_method(raw):
            raise TypeError(f'allowed: "{text}" is a {type(raw).__name__} and not a method')
        _refuse_own(text, module.__name__, class_attributes.name_of(owner).rpartition(".")[0])
        yield Entry(int(Kind.CALL_PYTHON), name, found, owner)
        yield from _of_function(found)
    elif isinstance(found, type):
        _refuse_own(text, module.__name__, found.__module__)
        yield from _of_class(name, found)
        own_module, own_name = callee.module_and_name(found)
        if f"{own_module}:{own_name}" != name and callee.is_found_at(found, own_module, own_name):
            yield from _of_class(f"{own_module}:{own_name}", found)
    elif _is_function(found):
        if not is_own:
            _refuse_own(text, module.__name__, _home_of(found))
        yield Entry(int(Kind.CALL_PYTHON), name, found)
        yield from _of_function(found)
    elif type(found) in _OPERATORS:
        yield from _of_function(found)
    else:
        raise TypeError(f'allowed names functions, classes and modules; "{text}" is {found!r}')


def _of_class(name: str, cls: type) -> Iterator[Entry]:
    yield Entry(int(Kind.CALL_PYTHON), name, cls)
    for method, function in _class_methods(cls):
        yield Entry(int(Kind.CALL_PYTHON), f"{name}.{method}", function)


def _of_function(function: object) -> Iterator[Entry]:
    """Yield a function under the wire name that callers use."""
    kind, name = callee.wire_name(function)
    if name != callee.UNNAMED:
        yield Entry(int(kind), name[COUNT.size :].decode(), function)
    if type(function) is OpOverloadPacket:
        # Overloads can also be called one by one.
        for overload in function.overloads():
            if overload != "default":
                found = getattr(function, overload)
                yield Entry(int(Kind.CALL_BUILTIN), found.name(), found)


def _of_operators(text: str) -> Iterator[Entry]:
    match = _NAMESPACE.fullmatch(text)
    if match is not None:
        yield from _of_namespace(match[1])
        return
    try:
        yield from _of_function(callee.builtin(text))
    except MpidistError as error:
        raise ValueError(f'allowed: "{text}": {error}') from error


def _of_namespace(namespace: str) -> Iterator[Entry]:
    """Yield a namespace's public operators in torch's dispatcher.

    TorchScript's own operators, ``aten::save`` for example, are not in the dispatcher.
    """
    names = [
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")
    ]
    if not names:
        raise ValueError(f'allowed: there are no operators "{namespace}::*" here')
    for name in dict.fromkeys(name for full in names for name in (full, full.partition(".")[0])):
        own = name.partition("::")[2]
        if not own.startswith("_") and own.partition(".")[0] != _OF_FILES:
            yield Entry(int(Kind.CALL_BUILTIN), name, None)


def _namespaces() -> set[str]:
    return {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}


def _is_function(found: object) -> bool:
    # Not by isinstance, which reads __class__: a module may hold lazy objects that raise there.
    return any(type(found) is kind for kind in _FUNCTIONS)


def _home_of(function: object) -> str:
    """Return the module that defines a function; an empty string if unknown."""
    if isinstance(function, torch.jit.ScriptFunction):
        home: str = torch._jit_internal._qualified_name(function).rpartition(".")[0]
        return "__main__" if home == "__torch__" else home.removeprefix("__torch__.")
    module = getattr(function, "__module__", None)
    return module if type(module) is str else ""


def _refuse_own(text: str, *modules: str) -> None:
    if any(module == "mpidist" or module.startswith("mpidist.") for module in modules):
        raise ValueError(
            f'allowed: "{text}" is internal to mpidist. Two entries admit its services: '
            f'"{OWN_ENTRIES[0]}" (optimizers) and "{OWN_ENTRIES[1]}" (remote modules)'
        )


# Methods of listed classes.


def _is_public(name: str) -> bool:
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
        for base in class_attributes.mro(cls)
        for name in class_attributes.own(base)
        if type(name) is str
    }
    return {
        name: _attribute(cls, name) for name in names if method_complaint(cls, name, lists) == ""
    }


def method_complaint(cls: type, name: str, lists: Lists) -> str:
    """Return why a method of a listed class may not be called; an empty string if it may be."""
    if not _is_public(name):
        return "this worker allows public methods only"
    base = class_attributes.definer(cls, name)
    if base is None:
        return "the class has no such method"
    if not lists(base, name):
        own = class_attributes.name_of(base)
        return (
            f'it is inherited from "{own}", which is not in the list ("{own}.{name}" admits '
            f'this method, "{own}" all of them)'
        )
    attribute = class_attributes.own(base)[name]
    if not _is_method(attribute):
        return f"it is of type {type(attribute).__qualname__} and not a method"
    if _is_foreign(attribute, base):
        return "it is a function of another module, or no function at all"
    return ""


def bound(attribute: Any, value: object, cls: type) -> Any:
    """Bind a method to an instance, as Python does after attribute look-up."""
    return type(attribute).__get__(attribute, value, cls)


def _class_methods(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the static and class methods that a class defines, by name, bound to the class."""
    for name, attribute in class_attributes.own(cls).items():
        if _is_bound_to_classes(attribute) and _is_public(name) and not _is_foreign(attribute, cls):
            yield name, bound(attribute, None, cls)


def _is_bound_to_classes(attribute: object) -> bool:
    """Return whether an attribute is a static or class method."""
    return _is_one_of(attribute, _BOUND_TO_CLASSES)


def _is_method(attribute: object) -> bool:
    """Return whether an attribute of a class is a method."""
    return _is_one_of(attribute, _METHODS)


def _is_one_of(attribute: object, kinds: tuple[type, ...]) -> bool:
    # By identity, not by "in": a metaclass may redefine equality.
    return any(type(attribute) is kind for kind in kinds)


def _attribute(cls: type, name: str) -> object:
    base = class_attributes.definer(cls, name)
    assert base is not None
    return class_attributes.own(base)[name]


def _is_foreign(attribute: object, cls: type) -> bool:
    """Return whether a method is another module's function, as in ``run = subprocess.run``."""
    function = attribute
    while type(function) in _WRAPPERS:
        function = getattr(function, _WRAPPERS[type(function)])
    if type(function) not in (FunctionType, BuiltinFunctionType):
        # Either a method of a C class, or a wrapper around a class, a property or an object.
        return function is not attribute
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or module == class_attributes.own(cls).get("__module__"):
        return False
    # A C function of another module is foreign; a Python function only if its module exports it.
    return type(function) is BuiltinFunctionType or (
        "." not in name and callee.is_found_at(function, module, name)
    )
