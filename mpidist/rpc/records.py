"""Records: dataclasses and named tuples as a name and the values of their fields, and back.

A record is made without any code of its class. No ``__init__``, ``__post_init__``, ``__new__`` or
descriptor of the class runs, also where the class is listed: its constructor runs where a message
*calls* it, never where a message contains an instance. So what ``__post_init__`` checks is not
checked, and a field holds any value that a message can hold; a function that takes records from
others checks them itself.

Fields are all that travels. An instance with further state (attributes that ``__post_init__`` adds,
the contents of a subclass of ``dict``) is not a record: it would arrive incomplete. Values of
``functools.cached_property`` are left behind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, MemberDescriptorType
from typing import Any

from mpidist.errors import FrameError
from mpidist.rpc import callee, class_dicts

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made at run time, not compiled in


@dataclass(frozen=True, slots=True)
class _Layout:
    """Fields of a class, and what an instance may have besides.

    Attributes:
        module: Where the class is found.
        qualname: Its name there.
        fields: Names, in order.
        is_tuple: It is a named tuple.
        cached: Names of cached properties.
        slots: Members in ``__slots__`` that are no fields.
    """

    module: str
    qualname: str
    fields: tuple[str, ...]
    is_tuple: bool
    cached: frozenset[str]
    slots: tuple[MemberDescriptorType, ...]


_MOST = 1024  # layouts kept
# By identity, as a metaclass may define what equal means; the class is kept, so that no other gets
# its number.
_layouts: dict[int, tuple[type, _Layout | None]] = {}


def fields_of(obj: Any) -> tuple[str, list[Any]] | None:
    """Return a record's class and values.

    Args:
        obj: Anything.

    Returns:
        ``"module:qualified name"`` of the class, and the values of its fields in order; None for
        what is no record: an instance of another class, of one that is not found by its name, with
        a field that is not set, or with further state.
    """
    cls = type(obj)
    layout = _layout_of(cls)
    if (
        layout is None
        or not callee.is_found_at(cls, layout.module, layout.qualname)
        or _has_further_state(obj, layout)
    ):
        return None
    if layout.is_tuple:
        values = list(tuple.__iter__(obj))
        if len(values) != len(layout.fields):
            return None
    else:
        try:
            values = [object.__getattribute__(obj, name) for name in layout.fields]
        except AttributeError:
            return None
    return f"{layout.module}:{layout.qualname}", values


def complaint(obj: Any) -> str:
    """Return why a dataclass instance or a named tuple is no record; an empty text for objects of other classes."""
    cls = type(obj)
    if not dataclasses.is_dataclass(cls) and not (
        isinstance(obj, tuple) and hasattr(cls, "_fields")
    ):
        return ""
    layout = _layout_of(cls)
    if layout is None:
        return "its class has a base in C, or a field that a descriptor sets"
    if not callee.is_found_at(cls, layout.module, layout.qualname):
        return f"its class is not found as {layout.module}.{layout.qualname}"
    more = sorted(set(getattr(obj, "__dict__", ())) - set(layout.fields) - layout.cached)
    if more:
        return f"it has attributes besides its fields: {', '.join(more)}"
    return "a field of it is not set, or it has further state in __slots__"


def is_record(cls: type) -> bool:
    """Say whether instances of a class can be made from values of fields."""
    return _layout_of(cls) is not None


def make_record(cls: type, values: Sequence[Any]) -> Any:
    """Make a record.

    Args:
        cls: A dataclass or a class of named tuples.
        values: Of its fields, in order.

    Raises:
        FrameError: More or fewer values than the class has fields, or a class of which there are no
            records.
    """
    layout = _layout_of(cls)
    if layout is None:
        raise FrameError(
            f'"{class_dicts.name_of(cls)}" is neither a dataclass nor a named tuple that is made '
            "by its fields"
        )
    if len(values) != len(layout.fields):
        raise FrameError(
            f'"{class_dicts.name_of(cls)}" has {len(layout.fields)} fields; the message has '
            f"{len(values)} values for them"
        )
    if layout.is_tuple:
        return tuple.__new__(cls, values)
    try:
        obj: Any = object.__new__(cls)
    except TypeError as error:  # an abstract class
        raise FrameError(f'"{class_dicts.name_of(cls)}" has no instances: {error}') from error
    for name, value in zip(layout.fields, values, strict=True):
        object.__setattr__(obj, name, value)
    return obj


def _has_further_state(obj: Any, layout: _Layout) -> bool:
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        attributes = ()
    fields = () if layout.is_tuple else layout.fields
    if any(name not in fields and name not in layout.cached for name in attributes):
        return True
    return any(_is_set(member, obj) for member in layout.slots)


def _is_set(member: MemberDescriptorType, obj: Any) -> bool:
    try:
        member.__get__(obj, type(obj))
    except AttributeError:
        return False
    return True


def _layout_of(cls: type) -> _Layout | None:
    try:
        return _layouts[id(cls)][1]
    except KeyError:
        if len(_layouts) >= _MOST:
            _layouts.clear()
        layout = _make_layout(cls)
        _layouts[id(cls)] = cls, layout
        return layout


def _make_layout(cls: type) -> _Layout | None:
    bases = class_dicts.mro(cls)
    is_tuple = class_dicts.is_below(cls, tuple)
    # The methods of a base in C rely on what its own constructor sets up.
    if any(_is_compiled(base) for base in bases if base is not object and base is not tuple):
        return None
    attributes = class_dicts.attributes(cls)
    if is_tuple:
        fields: Any = attributes.get("_fields")
        if type(fields) is not tuple or not all(type(name) is str for name in fields):
            return None
    elif type(attributes.get("__dataclass_fields__")) is dict:
        fields = tuple(field.name for field in dataclasses.fields(cls))
        if any(_runs_code(attributes.get(name)) for name in fields):
            return None
    else:
        return None
    module, _, qualname = class_dicts.name_of(cls, ":").partition(":")
    cached = frozenset(
        name for name, found in attributes.items() if type(found) is functools.cached_property
    )
    # Of all bases: a name that a class hides still has its place in the instance.
    members = [
        found
        for base in bases
        for name, found in class_dicts.own(base).items()
        if is_tuple or name not in fields
    ]
    slots = tuple(found for found in members if type(found) is MemberDescriptorType)
    return _Layout(module, qualname, fields, is_tuple, cached, slots)


def _is_compiled(cls: type) -> bool:
    return (
        not cls.__flags__ & _HEAP_TYPE
        or type(class_dicts.own(cls).get("__new__")) is BuiltinFunctionType
    )


def _runs_code(attribute: Any) -> bool:
    """Say whether to set an attribute of this name runs code: that of a descriptor."""
    kind = type(attribute)
    return kind is not MemberDescriptorType and (
        hasattr(kind, "__set__") or hasattr(kind, "__delete__")
    )
