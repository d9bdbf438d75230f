"""Extension types of RPC's messages: objects other than plain data and tensors.

::

    REFERENCE   u32: the index of a remote reference in the message
    NAMED       "module:qualified name": a function or class of the receiver's list
    WORKER      name, rank: a ``WorkerInfo``
    REGISTERED  number, contents: an object of a registered class (``Registered``)

All but references hold an array of these values, and are for workers with a list alone: the others
are sent a pickle. Names are keys of the receiver's list (``allowlist``): nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from mpidist.comm.serialization.data_format import NUMBER
from mpidist.errors import FrameError, NotPlainData
from mpidist.rpc.message import COUNT
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed, Refused
from mpidist.rpc.values.pickles import Reference, Registered
from mpidist.rpc.worker import WorkerInfo

REFERENCE, NAMED, WORKER, REGISTERED = range(32, 36)
_NAMED_TYPES = (
    *callee.NAMED_TYPES,
    MethodType,
    OpOverload,
    OpOverloadPacket,
    torch.jit.ScriptFunction,
    type,
)
_NO_NUMBER = 1 << 32

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


class ExtensionWriter:
    """Writer of the extension types of one message; ``extend`` is the hook of ``data_writer``.

    Args:
        is_data_only: The receiver reads data only, so objects other than references are written,
            too.

    Attributes:
        references: The references of the message, by number.
    """

    __slots__ = ("_is_data_only", "_numbers", "references")

    def __init__(self, is_data_only: bool) -> None:
        self.references: list[Reference] = []
        self._numbers: dict[int, int] = {}
        self._is_data_only = is_data_only

    def extend(self, obj: Any) -> tuple[int, list[object] | bytes] | None:
        """Return the extension code and values of an object; None if it has no extension type.

        Raises:
            NotAReference: The object is no reference, and the message may be a pickle.
            NotPlainData: A function or class without an importable name.
        """
        if isinstance(obj, Reference):
            return REFERENCE, NUMBER.pack(self.number_of(obj))
        if not self._is_data_only:
            # Not None, from which the writer makes an error with the object's text and place.
            raise NotAReference
        if type(obj) is WorkerInfo:
            return WORKER, [obj.name, obj.id]
        if isinstance(obj, _NAMED_TYPES):
            text = callee.wire_name(obj)[1][COUNT.size :].decode()
            if not text:
                raise NotPlainData(
                    f"{obj!r} cannot be named: it is not found under its module and qualified name"
                )
            return NAMED, [text]
        if isinstance(obj, Registered):
            for number, (known, _) in _registered.items():
                if type(obj) is known:
                    return REGISTERED, [number, *obj.contents()]
        return None

    def number_of(self, reference: Reference) -> int:
        """Return the number of a reference."""
        number = self._numbers.setdefault(id(reference), len(self.references))
        if number == len(self.references):
            self.references.append(reference)
        return number


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
            return self._allowed.value(_require(name, str))
        if code == WORKER:
            name, rank = values
            return WorkerInfo(name, _require(rank, int))
        if code == REGISTERED:
            known = _registered.get(_require(values[0], int))
            if known is None:
                raise Refused(
                    "an object of a kind that this worker does not know (a RemoteModule: import "
                    "mpidist.nn here)"
                )
            return known[1](*values[1:])
        raise FrameError(f"an extension type of unknown code {code}")


def _require(obj: Any, kind: type) -> Any:
    if type(obj) is not kind:
        raise FrameError(f"a {type(obj).__name__} in the place of a {kind.__name__}")
    return obj
