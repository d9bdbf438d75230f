"""Allowlist of one worker: what others may call here (``init_rpc(..., allowed=[...])``).

The list is an index from names to objects, built once. A name in a message is a key of the index,
or refused. No message causes an import, a split of its name, or a look-up in a module. An object
that is replaced in its module later stays in the index as it was found.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodDescriptorType, ModuleType
from typing import Any

from mpidist.comm.mpi import trust
from mpidist.errors import MpidistError
from mpidist.rpc.message import COUNT
from mpidist.rpc.names import callee

_MAX_PRINTED = 200  # characters of a name in an error
_NOT_LISTED = "it is not in the list of what this worker allows (init_rpc(..., allowed=[...]))"
_OF_CLASSES = (staticmethod, classmethod)
_METHODS = (
    FunctionType,
    MethodDescriptorType,
    callee.CACHED_TYPE,
    functools.partialmethod,
    *_OF_CLASSES,
)


class Refused(MpidistError):
    """A message names an object that this worker does not allow, or is a pickle."""


class Allowed:
    """Index of the objects that messages to one worker may name.

    A class admits its constructor, the static and class methods that it defines, and calls of the
    public methods and of ``__call__`` on values of exactly this class. Methods that it inherits
    need the class that defines them in the list. A module admits the public functions that it
    defines.

    Args:
        items: Functions, classes, operators of torch, script functions and modules, or names:
            ``"package.module.function"``, ``"package.module"``, ``"torch.add"``, ``"aten::mul"``.

    Raises:
        TypeError: Not a list, or an item that cannot be called.
        ValueError: A name that does not exist here, or an object that no message can name.
    """

    def __init__(self, items: Sequence[object]) -> None:
        if isinstance(items, str) or not isinstance(items, (list, tuple, set, frozenset)):
            raise TypeError(
                f"allowed is a list of names, functions, classes or modules; got {items!r}"
            )
        # The wire name of each: the kind of its call, and the object.
        self._functions: dict[bytes, tuple[int, Any]] = {}
        classes = []
        for item in items:
            for found in _objects_of(item):
                kind, name = _wire_name(found)
                self._functions[name] = kind, found
                if isinstance(found, type):
                    classes.append(found)
                    for method in _public_methods(found, _OF_CLASSES):
                        bound = getattr(found, method)
                        self._functions[name + b"." + method.encode()] = kind, bound
        self._methods: dict[type, dict[str, Any]] = {
            cls: {
                name: vars(base)[name]
                for base in reversed(cls.__mro__)
                if base in classes
                for name in _public_methods(base, _METHODS)
            }
            for cls in classes
        }

    def function(self, kind: int, name: bytes) -> callee.Function:
        """Return a listed function, class or operator.

        Args:
            kind: ``CALL_PYTHON``, ``CALL_BUILTIN`` or ``CALL_SCRIPT``.
            name: From ``message.unpack_name``: ``module:qualified name``, or an operator's name.

        Raises:
            Refused: The function is not in the list.
        """
        found = self._functions.get(name)
        if found is None or found[0] != kind:
            text = _printable(name.decode(errors="replace"))
            raise Refused(f'"{text}" may not be called: {_NOT_LISTED}')
        function: callee.Function = found[1]
        return function

    def value(self, name: str) -> object:
        """Return a listed function, class or operator that is named in a message's data.

        Raises:
            Refused: The object is not in the list.
        """
        found = self._functions.get(name.encode(errors="replace"))
        if found is None:
            raise Refused(f'"{_printable(name)}" may not be named: {_NOT_LISTED}')
        return found[1]

    def method(self, value: object, name: str) -> callee.Function:
        """Return a method of a value, bound to it; no code of the value runs.

        Raises:
            Refused: The class is not listed; the name is no public method that a listed class
                defines.
        """
        cls = type(value)
        own = f"{cls.__module__}.{cls.__qualname__}"
        if cls not in self._methods:
            raise Refused(f'methods of "{own}" may not be called: the class is not in the list')
        attribute = self._methods[cls].get(name)
        if attribute is None:
            raise Refused(
                f'"{own}.{_printable(name)}" may not be called: it is no public method that a '
                "class in the list defines"
            )
        bound: callee.Function = attribute.__get__(value, cls)
        return bound

    def has_class(self, cls: type) -> bool:
        """Return whether the list has this class itself."""
        return cls in self._methods


def make_allowlist(allowed: Sequence[object] | None) -> Allowed | None:
    """Make the list of ``init_rpc``; None for anything.

    Raises:
        MpidistError: None with ``MPIDIST_TRUST=data``.
    """
    if allowed is None and trust.is_data_only():
        raise MpidistError(
            f"{trust.ENV_TRUST}=data: init_rpc needs a list, allowed=[...]; without one others may "
            "call anything"
        )
    return Allowed(allowed) if allowed is not None else None


def _objects_of(item: object) -> Iterator[object]:
    found: object = item
    if isinstance(item, str):
        try:
            found = callee.builtin(item) if "::" in item else pkgutil.resolve_name(item)
        except (ImportError, AttributeError, ValueError, MpidistError) as error:
            raise ValueError(f'allowed: "{item}" leads nowhere: {error}') from error
    if not isinstance(found, ModuleType):
        yield found
        return
    functions = [
        function
        for name, function in vars(found).items()
        if type(function) in callee.NAMED_TYPES
        and not name.startswith("_")
        and function.__module__ == found.__name__
        and callee.wire_name(function)[1] != callee.UNNAMED
    ]
    if not functions:
        raise ValueError(
            f'allowed: "{found.__name__}" defines no public function; its classes are listed one '
            "by one"
        )
    yield from functions


def _wire_name(found: Any) -> tuple[int, bytes]:
    try:
        kind, name = callee.wire_name(found)
    except TypeError:
        raise TypeError(f"allowed names functions, classes and modules; got {found!r}") from None
    if name == callee.UNNAMED:
        raise ValueError(
            f"allowed: {found!r} is not found by a name of its module, so no message can name it"
        )
    return int(kind), name[COUNT.size :]


def _public_methods(cls: type, kinds: tuple[type, ...]) -> list[str]:
    """Return the names of the methods of these kinds that a class defines itself."""
    return [
        name
        for name, attribute in vars(cls).items()
        if type(attribute) in kinds and (not name.startswith("_") or name == "__call__")
    ]


def _printable(text: str) -> str:
    """Return a name from a message, safe for a log: one printable line of limited length."""
    text = text if "::" in text else text.replace(":", ".", 1)
    text = text if len(text) <= _MAX_PRINTED else f"{text[:_MAX_PRINTED]}..."
    return text if text.isprintable() else ascii(text)[1:-1]
