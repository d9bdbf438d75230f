"""Encoding of arguments and results: a skeleton, a tensor table, and a reference table.

Plain data (None, bool, int, float, complex, str, bytes, ``...``, tuples, lists, dicts, sets and
frozensets of it) is always written by Python's ``marshal``, version 4, which names no code. Each
tensor, parameter, array, bytearray and reference is replaced by a mark: the k-th mark of the
skeleton stands for the k-th slot. An object that contains anything else is pickled as a whole; its
tensors and references are still in the tables. Functions and classes are pickled by name; those
without an importable name need cloudpickle. See docs/decisions/0012.
"""

from __future__ import annotations

import marshal
import operator
import pickle
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch

from mpidist.comm.serialization import inline_rows, tensor_table
from mpidist.comm.serialization.inline_rows import COUNTS_OF_ONE
from mpidist.comm.serialization.tensor_format import HOST, Buffer, Part, Tabled
from mpidist.rpc import pickles, remote_error
from mpidist.rpc.pickles import Reference
from mpidist.rpc.plain_data import MARK, SCALARS, NotPlain, Walk

Tensor = torch.Tensor

# Flags of a message, for the layout of its content.
PICKLED = 1  # the skeleton is a pickle
KEYWORDS = 2  # a call's skeleton begins with the names of its last arguments
TABLE = 4  # a tensor table precedes the skeleton
# Slot numbers precede the skeleton, because the marks are not in the order of references, objects.
SLOTS = 8

LONE_MARK = marshal.dumps(MARK, 4)
LONE_ARGUMENT = marshal.dumps((MARK,), 4)
_MARSHAL_VERSION = 4
COUNT = struct.Struct("<I")

Args: TypeAlias = Iterable[Any] | None
Kwargs: TypeAlias = Mapping[str, Any] | None


class Encoder(Protocol):
    """Encoder of the messages to one worker: the module ``codec``, or a ``DataEncoder``."""

    def encode(self, obj: object) -> Content:
        """Encode a result."""

    def encode_function(self, function: object, name: bytes, args: Args, kwargs: Kwargs) -> Content:
        """Encode a call's arguments."""

    def describe_error(self, error: BaseException) -> object:
        """Return an exception as plain data."""


class Content:
    """An encoded object.

    Attributes:
        flags: The layout.
        skeleton: The marshalled data, or the pickle.
        table: The tensor table in pieces, if all objects are small; None if ``body`` writes it.
        objects: Tensors, parameters, arrays and bytearrays of the table. Distributed autograd
            records the tensors.
        references: Remote references.
        slots: For each mark its index into references + objects; empty if the marks are in that
            order.
        buffers: Out-of-band buffers of a pickle.
        is_dense: Tensors whose elements overlap in memory are copied to a dense layout.
    """

    __slots__ = (
        "buffers",
        "flags",
        "is_dense",
        "objects",
        "references",
        "skeleton",
        "slots",
        "table",
    )

    def __init__(
        self,
        flags: int,
        skeleton: bytes,
        table: Sequence[Buffer] | None = (),
        objects: Sequence[Tabled] = (),
    ) -> None:
        self.flags = flags
        self.skeleton = skeleton
        self.table = table
        self.objects = objects
        self.references: Sequence[Reference] = ()
        self.slots: Sequence[int] = ()
        self.buffers: Sequence[pickle.PickleBuffer] = ()
        self.is_dense = False

    def body(
        self, device_map: Mapping[int, int] | None
    ) -> tuple[int, bytes, list[Part], list[int | None]]:
        """Return flags, tables and skeleton, the separate parts, and the devices of the parts.

        Raises:
            ValueError: A tensor on a device that ``device_map`` does not name.
        """
        flags = self.flags
        parts: list[Part] = []
        devices: list[int | None] = []
        if self.table is not None and not (device_map and HOST in device_map):
            pieces = list(self.table)
        else:
            table, parts, devices = tensor_table.describe(self.objects, device_map, self.is_dense)
            pieces = [table]
        if self.objects:
            flags |= TABLE
        if self.slots:
            flags |= SLOTS
            pieces += (COUNT.pack(len(self.slots)), array("I", self.slots).tobytes())
        for item in self.buffers:
            parts.append(item.raw())
            devices.append(None)
        return flags, b"".join((*pieces, self.skeleton)), parts, devices


EMPTY = Content(0, b"")  # no arguments; None as a result


def encode_call(args: Args, kwargs: Kwargs) -> Content:
    """Encode a call's arguments.

    Raises:
        Exception: The arguments cannot be pickled.
    """
    if type(args) is not tuple:
        args = tuple(args or ())
    if kwargs:
        items: tuple[Any, ...] = (*args, *kwargs.values())
        head: tuple[Any, ...] = (tuple(kwargs),)
        flags = KEYWORDS
    elif args:
        items, head, flags = args, (), 0
        if len(items) == 1 and type(items[0]) is Tensor:
            row = inline_rows.inline_row(items[0])
            if row is not None:
                return Content(0, LONE_ARGUMENT, (COUNTS_OF_ONE, *row), items)
    else:
        return EMPTY
    try:
        if SCALARS.issuperset(map(type, items)):
            return Content(flags, marshal.dumps(head + items, _MARSHAL_VERSION))
        return _encode_walked(flags, head, items)
    except (NotPlain, RecursionError, ValueError):
        # ValueError: marshal accepts neither an object of 2 GiB nor argument names of a subclass of
        # str.
        return encode_pickled((args, kwargs or {}))


def encode_function(function: object, name: bytes, args: Args, kwargs: Kwargs) -> Content:
    """Encode a call's arguments, and the function if it has no ``name`` (``callee.wire_name``).

    Raises:
        Exception: Function or arguments cannot be pickled.
    """
    return (
        encode_call(args, kwargs)
        if len(name) > 2
        else encode_pickled((function, tuple(args or ()), kwargs or {}))
    )


def encode(obj: Any) -> Content:
    """Encode a result.

    Raises:
        Exception: The result cannot be pickled.
    """
    if obj is None:
        return EMPTY
    kind = type(obj)
    if kind in SCALARS:
        try:
            return Content(0, marshal.dumps(obj, _MARSHAL_VERSION))
        except ValueError:
            return encode_pickled(obj)  # 2 GiB or more
    if kind is Tensor:
        row = inline_rows.inline_row(obj)
        if row is not None:
            return Content(0, LONE_MARK, (COUNTS_OF_ONE, *row), (obj,))
        if tensor_table.is_describable(obj):
            return Content(0, LONE_MARK, None, (obj,))
    try:
        return _encode_walked(0, None, (obj,))
    except (NotPlain, RecursionError):
        return encode_pickled(obj)


def describe_error(error: BaseException) -> object:
    """Return an exception as plain data, for ``remote_error.rebuild``."""
    return remote_error.describe(error)


def encode_pickled(obj: object) -> Content:
    """Encode an object by pickle.

    Raises:
        Exception: Pickling has failed, or cloudpickle is needed and not installed.
    """
    data, sink = pickles.dumps(obj)
    content = Content(PICKLED, data, None if sink.objects else (), sink.objects)
    content.references, content.buffers = sink.references, sink.buffers
    return content


def _encode_walked(flags: int, head: tuple[Any, ...] | None, items: Sequence[object]) -> Content:
    """Encode a call's arguments behind ``head``; a single object if ``head`` is None."""
    skeleton: list[Any] = []
    met: list[Any] = []
    references, is_mixed, walk = 0, False, None
    for item in items:
        kind = type(item)
        if kind in SCALARS:
            skeleton.append(item)
        elif kind is Tensor:
            met.append(item)
            skeleton.append(MARK)
        elif isinstance(item, Reference):
            if references == len(met):
                references += 1
            else:
                is_mixed = True  # a reference behind an object
            met.append(item)
            skeleton.append(MARK)
        else:
            if walk is None:
                walk = Walk(Reference, met)
            skeleton.append(walk.replace(item))
    try:
        data = marshal.dumps(skeleton[0] if head is None else (*head, *skeleton), _MARSHAL_VERSION)
    except ValueError:
        raise NotPlain from None  # too deep
    content = Content(flags, data)
    if not met:
        return content
    if walk is None and not is_mixed and (len(met) == 1 or len(set(map(id, met))) == len(met)):
        content.references, content.objects = (
            (met[:references], met[references:]) if references else ((), met)
        )
    else:
        _assign_slots(content, met)
    if content.objects:
        content.table = inline_rows.inline_table(content.objects)
        if content.table is None and not all(map(tensor_table.is_describable, content.objects)):
            raise NotPlain
    return content


def _assign_slots(content: Content, met: list[Any]) -> None:
    """Distribute the marked objects to the tables; set ``slots`` if the order has changed."""
    unique = {id(obj): obj for obj in met}.values()
    references = [obj for obj in unique if isinstance(obj, Reference)]
    objects = [obj for obj in unique if not isinstance(obj, Reference)]
    content.references, content.objects = references, objects
    if len(unique) == len(met) and all(map(operator.is_, met, chain(references, objects))):
        return
    numbers = {id(obj): number for number, obj in enumerate(chain(references, objects))}
    content.slots = [numbers[id(obj)] for obj in met]
