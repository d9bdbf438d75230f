"""Extension types of data-only messages: objects other than plain data and tensors.

::

    REFERENCE   u32: the index of a remote reference in the message
    NAMED       "module:qualified name": a function or class of the receiver's list
    RECORD      name, fields: a dataclass or named tuple of the receiver's list (``records``)
    ERROR       name, text, arguments, attributes: an exception
    WORKER      name, rank: a ``WorkerInfo``
    REGISTERED  number, contents: an object of a registered class (``Registered``)

All but references hold an array of these values. Names are looked up in the receiver's list
(``allowlist``). Nothing is imported, no constructor of a user's class runs. A worker without a list
reads references alone: for the rest it is sent a pickle.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from mpidist.comm.serialization import data_writer
from mpidist.comm.serialization.data_format import NUMBER
from mpidist.comm.serialization.tensor_format import Tabled
from mpidist.errors import FrameError, NotPlainData
from mpidist.rpc.message import COUNT
from mpidist.rpc.names import callee, records
from mpidist.rpc.names.allowlist import Allowed, Refused, printable_name
from mpidist.rpc.values.pickles import Reference, Registered
from mpidist.rpc.worker import WorkerInfo

REFERENCE, NAMED, RECORD, ERROR, WORKER, REGISTERED = range(32, 38)
_NAMED_TYPES = frozenset({*callee.NAMED_TYPES, MethodType, OpOverload, OpOverloadPacket})
_OWN = "mpidist."
_NO_NUMBER = 1 << 32
_UNICODE_ERRORS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)

# By number: a registered class, and the function that makes an instance from its contents.
_registered: dict[int, tuple[type, Callable[..., object]]] = {}


def register_class(number: int, kind: type[Registered], make: Callable[..., object]) -> None:
    """Register a class under a number.

    Args:
        number: In messages.
        kind: The class; subclasses are not included.
        make: Checks the ``contents()`` of a received object and makes the object.
    """
    _registered[number] = kind, make


class NotAReference(Exception):
    """An object has no extension type in a message that may hold a pickle instead."""


class ReferenceWriter:
    """Writer of the references of one message; ``extend`` is the hook of ``data_writer``.

    Attributes:
        references: The references of the message, by number.
    """

    __slots__ = ("_numbers", "references")

    def __init__(self) -> None:
        self.references: list[Reference] = []
        self._numbers: dict[int, int] = {}

    def extend(self, obj: Any) -> tuple[int, list[object] | bytes] | None:
        """Return the extension code and bytes of a reference.

        Raises:
            NotAReference: The object is no reference.
        """
        # Not None, from which the writer makes an error with the object's text and place.
        if not isinstance(obj, Reference):
            raise NotAReference
        return REFERENCE, NUMBER.pack(self.number_of(obj))

    def number_of(self, reference: Reference) -> int:
        """Return the number of a reference."""
        number = self._numbers.setdefault(id(reference), len(self.references))
        if number == len(self.references):
            self.references.append(reference)
        return number


class ExtensionWriter(ReferenceWriter):
    """Writer of the extension types of one message without pickles."""

    __slots__ = ()

    def extend(self, obj: Any) -> tuple[int, list[object] | bytes] | None:
        """Return the extension code and values of an object; None if it has no extension type."""
        if isinstance(obj, Reference):
            return super().extend(obj)
        kind = type(obj)
        if kind is WorkerInfo:
            return WORKER, [obj.name, obj.id]
        if kind in _NAMED_TYPES or isinstance(obj, (type, torch.jit.ScriptFunction)):
            return _encode_name(obj)
        if isinstance(obj, Registered):
            for number, (known, _) in _registered.items():
                if kind is known:
                    return REGISTERED, [number, *obj.contents()]
            return None
        if isinstance(obj, Exception):
            return ERROR, list(error_values(obj))
        record = records.fields_of(obj)
        if record is not None:
            name, fields = record
            return RECORD, [name, *fields]
        reason = records.complaint(obj)
        if reason:
            raise NotPlainData(f"{NotPlainData.of(obj).reason}: {reason}")
        return None


def _encode_name(obj: object) -> tuple[int, list[object]]:
    text = callee.wire_name(obj)[1][COUNT.size :].decode()
    if not text:
        raise NotPlainData(
            f"{obj!r} cannot be named: it is not found under its module and qualified name"
        )
    return NAMED, [text]


def error_values(error: BaseException) -> tuple[str, str, tuple[object, ...], dict[str, object]]:
    """Return an exception's name, text, and those arguments and attributes that are plain data."""
    kind = type(error)
    arguments = error.args if all(map(_is_data, error.args)) else (_error_text(error),)
    attributes: dict[str, object] = {}
    if kind.__module__.startswith(_OWN):
        attributes = {
            name: value
            for name, value in error.__dict__.items()
            if not name.startswith("_") and _is_data(value)
        }
    elif isinstance(error, OSError) and len(arguments) == 2 and type(error.filename) is str:
        arguments = (
            *arguments,
            error.filename,
            None,
            error.filename2 if type(error.filename2) is str else None,
        )
    return f"{kind.__module__}:{kind.__qualname__}", _error_text(error), arguments, attributes


def _is_data(obj: object) -> bool:
    objects: list[Tabled] = []
    try:
        data_writer.dumps(obj, objects)
    except Exception:
        return False
    return not objects


def _error_text(error: BaseException) -> str:
    try:
        return f"{error}"
    except BaseException as failure:
        return f"(its text raised {type(failure).__name__})"


class ExtensionReader:
    """Reader of the extension types of one message; ``extend`` is the hook of ``data_reader``.

    Args:
        references: The references of the message.
        allowed: The list of this worker; None if it reads pickles, whose messages have references
            alone.
    """

    __slots__ = ("_allowed", "_references")

    def __init__(self, references: Sequence[Reference], allowed: Allowed | None) -> None:
        self._references = references
        self._allowed = allowed

    def extend(
        self, code: int, data: memoryview, read: Callable[[memoryview], list[Any]]
    ) -> object:
        """Make an object from its code and bytes; ``read`` reads the values in them.

        Raises:
            Refused: A name is not in the list.
            FrameError: The values are not valid for the code.
        """
        if code == REFERENCE:
            (number,) = NUMBER.unpack(data) if len(data) == NUMBER.size else (_NO_NUMBER,)
            if number >= len(self._references):
                raise FrameError(
                    f"a mark of a reference beyond the {len(self._references)} that came with it"
                )
            return self._references[number]
        if self._allowed is None:
            raise FrameError(f"an extension type of code {code} at a worker that reads pickles")
        values = read(data)
        if code == NAMED:
            (name,) = values
            return self._allowed.value(_text(name))
        if code == RECORD:
            return records.make_record(self._allowed.record(_text(values[0])), values[1:])
        if code == ERROR:
            return make_error(values, self._allowed)
        if code == WORKER:
            name, rank = values
            if type(rank) is not int:
                raise FrameError("a worker without a rank")
            return WorkerInfo(_text(name), rank)
        if code == REGISTERED:
            known = _registered.get(values[0]) if values and type(values[0]) is int else None
            if known is None:
                raise Refused(
                    "an object of a kind that this worker does not know (a RemoteModule: import "
                    "mpidist.nn here)"
                )
            return known[1](*values[1:])
        raise FrameError(f"an extension type of unknown code {code}")


def make_error(values: Sequence[object], allowed: Allowed) -> Exception:
    """Make an exception from ``error_values``.

    No constructor of a user's class runs.

    Raises:
        Refused: The class is neither Python's nor in ``mpidist.errors`` or the list.
        FrameError: The values are not valid for an exception.
    """
    name, text, arguments, attributes = values
    kind = allowed.exception(_text(name))
    if kind is None:
        raise Refused(
            f'exceptions of "{printable_name(name)}" are not in the list of what this worker allows'
        )
    if (
        type(arguments) is not tuple
        or type(attributes) is not dict
        or not all(type(key) is str for key in attributes)
    ):
        raise FrameError("no arguments of an exception")
    if kind.__module__ == builtins.__name__:
        return kind(*_safe_arguments(kind, _text(text), arguments))
    rebuilt: Exception
    if kind.__module__.startswith(_OWN):
        rebuilt = kind(*arguments)
        rebuilt.__dict__.update(attributes)
        return rebuilt
    base: Any = kind
    while base.__module__ != builtins.__name__:
        base = base.__base__  # the base class with the same memory layout
    arguments = _safe_arguments(base, _text(text), arguments)
    rebuilt = base.__new__(kind, *arguments)
    rebuilt.args = arguments
    return rebuilt


def _safe_arguments(kind: type, text: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments that are safe for one of Python's exception classes.

    Some classes do not check their arguments when they are formatted: ``UnicodeDecodeError`` reads
    its object at any start (CPython up to 3.13), and a traceback prints one mark for each column of
    a ``SyntaxError``.

    Raises:
        FrameError: The arguments are not valid for the class.
    """
    if issubclass(kind, SyntaxError):
        return (text,)
    if issubclass(kind, _UNICODE_ERRORS):
        held: type = bytes if issubclass(kind, UnicodeDecodeError) else str
        kinds = (
            [held, int, int, str]
            if issubclass(kind, UnicodeTranslateError)
            else [str, held, int, int, str]
        )
        if list(map(type, arguments)) != kinds:
            raise FrameError(f"no arguments of a {kind.__name__}")
        obj, start, end = arguments[-4:-1]
        if not 0 <= start <= end <= len(obj):
            raise FrameError(f"a {kind.__name__} beyond its object")
    return arguments


def _text(obj: object) -> str:
    if type(obj) is not str:
        raise FrameError(f"a {type(obj).__name__} in the place of a name")
    return obj
