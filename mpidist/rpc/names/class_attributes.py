"""Attributes and names of classes, read without running code of the classes.

``getattr`` on a class or an instance may run users' code: metaclasses, ``__getattr__``, properties,
a false ``__class__``. Here the descriptors of ``type`` read the class objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_DICT = type.__dict__["__dict__"]
_MRO = type.__dict__["__mro__"]
_MODULE = type.__dict__["__module__"]
_QUALNAME = type.__dict__["__qualname__"]


def own(cls: type) -> Mapping[str, object]:
    """Return the attributes that a class defines itself."""
    found: MappingProxyType[str, object] = _DICT.__get__(cls)
    return found


def mro(cls: type) -> tuple[type, ...]:
    """Return a class and its bases in method resolution order."""
    found: tuple[type, ...] = _MRO.__get__(cls)
    return found


def is_below(cls: type, base: type) -> bool:
    """Return whether a class is another or inherits from it, compared by identity."""
    return any(found is base for found in mro(cls))


def attributes(cls: type) -> dict[str, object]:
    """Return the attributes of a class and its bases, in method resolution order."""
    found: dict[str, object] = {}
    for base in reversed(mro(cls)):
        found.update(own(base))
    return found


def definer(cls: type, name: str) -> type | None:
    """Return the first class in method resolution order that defines a name."""
    return next((base for base in mro(cls) if name in own(base)), None)


def name_of(cls: type, separator: str = ".") -> str:
    """Return a class's module and qualified name; ``?`` for a module that is not a string."""
    module = _MODULE.__get__(cls)
    return f"{module if type(module) is str else '?'}{separator}{_QUALNAME.__get__(cls)}"
