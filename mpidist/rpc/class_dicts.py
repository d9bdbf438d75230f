"""Classes' attributes and names, read without running code of theirs.

``getattr`` on a class or an instance runs what they define: metaclasses, ``__getattr__``,
properties, a ``__class__`` that lies. Here ``type``'s own descriptors read the class objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_DICT = type.__dict__["__dict__"]
_MRO = type.__dict__["__mro__"]
_MODULE = type.__dict__["__module__"]
_QUALNAME = type.__dict__["__qualname__"]


def own(cls: type) -> Mapping[str, Any]:
    """Return what a class defines itself."""
    found: MappingProxyType[str, Any] = _DICT.__get__(cls)
    return found


def mro(cls: type) -> tuple[type, ...]:
    """Return a class and those that it inherits from, in the order of Python's look-up."""
    found: tuple[type, ...] = _MRO.__get__(cls)
    return found


def is_below(cls: type, base: type) -> bool:
    """Say whether a class inherits from another, or is it: this very one, whatever a metaclass calls equal."""
    return any(found is base for found in mro(cls))


def attributes(cls: type) -> dict[str, Any]:
    """Return all that instances find in a class: each name as the first class of the order defines it."""
    found: dict[str, Any] = {}
    for base in reversed(mro(cls)):
        found.update(own(base))
    return found


def definer(cls: type, name: str) -> type | None:
    """Return the first class of the order that defines a name."""
    return next((base for base in mro(cls) if name in own(base)), None)


def name_of(cls: type, separator: str = ".") -> str:
    """Return a class's module and qualified name, ``?`` for a module that is no text."""
    module = _MODULE.__get__(cls)
    return f"{module if type(module) is str else '?'}{separator}{_QUALNAME.__get__(cls)}"
