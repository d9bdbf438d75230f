"""Records: dataclass instances and named tuples, encoded as a class name and field values.

A record is rebuilt without running code of its class: no ``__init__``, ``__post_init__``,
``__new__`` or descriptor. A listed class's constructor runs only if a message *calls* it, never if
a message contains an instance. So the checks of ``__post_init__`` do not run, and a field may have
any value that a message can contain; a function that takes records from others must check them.

A class with ``__del__`` has no records: it would run with fields that the sender chose, also
where the message is refused. ``__hash__`` and ``__eq__`` run where a record is the key of a dict or
in a set.

Only fields are sent. An instance with further state (attributes that ``__post_init__`` adds, the
contents of a subclass of ``dict``) is not a record, because it would arrive incomplete. Values of
``functools.cached_property`` are dropped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, MemberDescriptorType
from typing import Any

from mpidist.errors import FrameError
from mpidist.rpc.names import callee, class_attributes

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: class created at run time


@dataclass(frozen=True, slots=True)
class _Layout:
    """Fields of a record class, and further attributes of its instances.

    Attributes:
        module: The module of the class.
        qualname: The qualified name of the class in the module.
        fields: Names, in order.
        is_tuple: The class is a named tuple.
        cached: Names of cached properties.
        slots: Members of ``__slots__`` that are not fields.
    """

    module: str
    qualname: str
    fields: tuple[str, ...]
    is_tuple: bool
    cached: frozenset[str]
    slots: tuple[MemberDescriptorType, ...]


_MAX_LAYOUTS = 1024  # a full cache is cleared

# By id, because a metaclass may redefine equality. The class is kept, so that its id is not reused.
_layouts: dict[int, tuple[type, _Layout | None]] = {}


def fields_of(obj: Any) -> tuple[str, list[object]] | None:
    """Return the class name and the field values of a record.

    Args:
        obj: Any object.

    Returns:
        ``"module:qualified name"`` of the class, and the values of its fields in order. None if the
        object is not a record: its class has another type or is not importable by its name, a field
        is not set, or there is further state.
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


def complaint(obj: object) -> str:
    """Return why a dataclass instance or named tuple is not a record; else an empty string."""
    cls = type(obj)
    if not dataclasses.is_dataclass(cls) and not (
        isinstance(obj, tuple) and hasattr(cls, "_fields")
    ):
        return ""
    layout = _layout_of(cls)
    if layout is None and _has_finalizer(cls):
        return "its class has __del__, which would run with fields that a sender chooses"
    if layout is None:
        return "its class has a base in C, or a field that a descriptor sets"
    if not callee.is_found_at(cls, layout.module, layout.qualname):
        return f"its class is not found as {layout.module}.{layout.qualname}"
    more = sorted(set(getattr(obj, "__dict__", ())) - set(layout.fields) - layout.cached)
    if more:
        return f"it has attributes besides its fields: {', '.join(more)}"
    return "a field of it is not set, or it has further state in __slots__"


def is_record(cls: type) -> bool:
    """Return whether instances of a class can be made from field values."""
    return _layout_of(cls) is not None


def obstacle(cls: type) -> str:
    """Return why a class has no records, as the end of a sentence about it."""
    if _has_finalizer(cls):
        return "has __del__, which would run with fields that a sender chooses"
    return "is neither a dataclass nor a named tuple that is made by its fields"


def make_record(cls: type, values: Sequence[object]) -> object:
    """Make a record.

    Args:
        cls: A dataclass or a class of named tuples.
        values: The field values, in order.

    Raises:
        FrameError: The number of values differs from the number of fields, or the class is not a
            record class.
    """
    layout = _layout_of(cls)
    if layout is None:
        raise FrameError(f'"{class_attributes.name_of(cls)}" {obstacle(cls)}')
    if len(values) != len(layout.fields):
        raise FrameError(
            f'"{class_attributes.name_of(cls)}" has {len(layout.fields)} fields; the message has '
            f"{len(values)} values for them"
        )
    if layout.is_tuple:
        return tuple.__new__(cls, values)
    try:
        obj: Any = object.__new__(cls)
    except TypeError as error:  # abstract class
        raise FrameError(f'"{class_attributes.name_of(cls)}" has no instances: {error}') from error
    for name, value in zip(layout.fields, values, strict=True):
        object.__setattr__(obj, name, value)
    return obj


def _has_further_state(obj: object, layout: _Layout) -> bool:
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        attributes = ()
    fields = () if layout.is_tuple else layout.fields
    if any(name not in fields and name not in layout.cached for name in attributes):
        return True
    return any(_is_set(member, obj) for member in layout.slots)


def _is_set(member: MemberDescriptorType, obj: object) -> bool:
    try:
        member.__get__(obj, type(obj))
    except AttributeError:
        return False
    return True


def _layout_of(cls: type) -> _Layout | None:
    try:
        return _layouts[id(cls)][1]
    except KeyError:
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        layout = _make_layout(cls)
        _layouts[id(cls)] = cls, layout
        return layout


def _make_layout(cls: type) -> _Layout | None:
    bases = class_attributes.mro(cls)
    is_tuple = class_attributes.is_below(cls, tuple)
    # The methods of a base class in C rely on state that its constructor initialises.
    if any(_is_compiled(base) for base in bases if base is not object and base is not tuple):
        return None
    if _has_finalizer(cls):
        return None
    attributes = class_attributes.attributes(cls)
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
    module, _, qualname = class_attributes.name_of(cls, ":").partition(":")
    cached = frozenset(
        name for name, found in attributes.items() if type(found) is functools.cached_property
    )
    # Of all base classes: a member that a derived class hides still exists in the instance.
    members = [
        found
        for base in bases
        for name, found in class_attributes.own(base).items()
        if is_tuple or name not in fields
    ]
    slots = tuple(found for found in members if type(found) is MemberDescriptorType)
    return _Layout(module, qualname, fields, is_tuple, cached, slots)


def _has_finalizer(cls: type) -> bool:
    return any("__del__" in class_attributes.own(base) for base in class_attributes.mro(cls))


def _is_compiled(cls: type) -> bool:
    return (
        not cls.__flags__ & _HEAP_TYPE
        or type(class_attributes.own(cls).get("__new__")) is BuiltinFunctionType
    )


def _runs_code(attribute: object) -> bool:
    """Return whether setting the attribute would run a descriptor's code."""
    kind = type(attribute)
    return kind is not MemberDescriptorType and (
        hasattr(kind, "__set__") or hasattr(kind, "__delete__")
    )
