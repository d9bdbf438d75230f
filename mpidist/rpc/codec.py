"""Encoding of arguments and results: a skeleton, and tensors and remote references in tables beside it.

Plain data (None, bool, int, float, complex, str, bytes, ``...``, tuples, lists, dicts, sets and
frozensets of it) is always written in one data format, Python's ``marshal``, version 4; it names no
code. Tensors, parameters, arrays, bytearrays and references in it are marked by their place: the
k-th mark of the skeleton stands for the k-th slot. Whatever holds anything else is pickled whole;
its tensors and references are in the tables all the same. Functions and classes travel by name in a
pickle; those without an importable name need cloudpickle. See docs/decisions/0012.
"""

from __future__ import annotations

import marshal
import operator
import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from mpidist.comm.serialization import inline_rows, tensor_table
from mpidist.rpc import pickles, remote_error
from mpidist.rpc.pickles import Reference
from mpidist.rpc.plain_data import MARK, SCALARS, NotPlain, Walk

Tensor = torch.Tensor

# How a content is written: flags of its message.
PICKLED = 1  # the skeleton is a pickle
KEYWORDS = 2  # a call's skeleton begins with the names of its last arguments
TABLE = 4  # the tensor table stands before the skeleton
# slots do not stand in the order of references, then objects; their numbers stand before the
# skeleton
SLOTS = 8

LONE_MARK = marshal.dumps(MARK, 4)
LONE_ARGUMENT = marshal.dumps((MARK,), 4)
_MARSHAL_VERSION = 4
COUNT = struct.Struct("<I")


class Content:
    """An encoded object.

    Attributes:
        flags: How it is written.
        skeleton: The marshalled data, or the pickle.
        table: Of the objects, if all are small, in pieces to be joined; None if it is written with
            the message.
        objects: Tensors, parameters, arrays and bytearrays of the table; distributed autograd sees
            the tensors.
        references: Remote references.
        slots: For each mark its number among references, then objects; empty if they stand in that
            order.
        buffers: Out-of-band memory of a pickle.
        is_dense: Tensors whose elements share memory are written as copies in which none do.
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
        table: Sequence[Any] | None = (),
        objects: Sequence[Any] = (),
    ) -> None:
        self.flags = flags
        self.skeleton = skeleton
        self.table = table
        self.objects = objects
        self.references: Sequence[Reference] = ()
        self.slots: Sequence[int] = ()
        self.buffers: Sequence[Any] = ()
        self.is_dense = False

    def body(self, device_map: Any) -> tuple[int, bytes, list[Any], list[int | None]]:
        """Return flags, tables and skeleton, the parts that travel beside them, and the parts' devices.

        Raises:
            ValueError: A tensor on a device that ``device_map`` does not name.
        """
        flags = self.flags
        parts: list[Any] = []
        devices: list[int | None] = []
        if self.table is not None:
            pieces = list(self.table)
        else:
            table, parts, devices = tensor_table.described(self.objects, device_map, self.is_dense)
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


def encode_call(args: Any, kwargs: Any) -> Content:
    """Encode a call's arguments.

    Raises:
        Exception: They cannot be pickled.
    """
    if type(args) is not tuple:
        args = tuple(args or ())  # an iterator gives its items once
    if kwargs:
        items: tuple[Any, ...] = (*args, *kwargs.values())
        head: tuple[Any, ...] = (tuple(kwargs),)
        flags = KEYWORDS
    elif args:
        items, head, flags = args, (), 0
        if len(items) == 1 and type(items[0]) is Tensor:
            table = inline_rows.lone_table(items[0])
            if table is not None:
                return Content(0, LONE_ARGUMENT, table, items)
    else:
        return EMPTY
    try:
        if SCALARS.issuperset(map(type, items)):
            return Content(flags, marshal.dumps(head + items, _MARSHAL_VERSION))
        return _encode_walked(flags, head, items)
    except (NotPlain, RecursionError, ValueError):
        # ValueError: marshal takes neither 2 GiB in one nor names of arguments that are of a
        # subclass of str.
        return encode_pickled((args, kwargs or {}))


def encode_function(function: Any, name: bytes, args: Any, kwargs: Any) -> Content:
    """Encode a call's arguments, and the function itself if it has no ``name`` (``callee.wire_name``).

    Raises:
        Exception: They cannot be pickled.
    """
    return (
        encode_call(args, kwargs)
        if len(name) > 2
        else encode_pickled((function, tuple(args or ()), kwargs or {}))
    )


def encode(obj: Any) -> Content:
    """Encode a result.

    Raises:
        Exception: It cannot be pickled.
    """
    if obj is None:
        return EMPTY
    kind = type(obj)
    if kind in SCALARS:
        try:
            return Content(0, marshal.dumps(obj, _MARSHAL_VERSION))
        except ValueError:
            return encode_pickled(obj)  # 2 GiB in one
    if kind is Tensor:
        table = inline_rows.lone_table(obj)
        if table is not None or tensor_table.is_describable(obj):
            return Content(0, LONE_MARK, table, (obj,))
    try:
        return _encode_walked(0, None, (obj,))
    except (NotPlain, RecursionError):
        return encode_pickled(obj)


def describe_error(error: BaseException) -> Any:
    """Return an exception as ``remote_error.rebuild`` takes it."""
    return remote_error.describe(error)


def encode_pickled(obj: Any) -> Content:
    """Encode an object by pickle.

    Raises:
        Exception: What pickling raises; without an importable name, and without cloudpickle.
    """
    data, sink = pickles.dumps(obj)
    content = Content(PICKLED, data, None if sink.objects else (), sink.objects)
    content.references, content.buffers = sink.references, sink.buffers
    return content


def _encode_walked(flags: int, head: tuple[Any, ...] | None, items: Sequence[Any]) -> Content:
    """Encode a call's arguments behind ``head``; a lone object, if that is None."""
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
                is_mixed = True  # it stands behind an object
            met.append(item)
            skeleton.append(MARK)
        else:
            if walk is None:
                walk = Walk(Reference, met)
            skeleton.append(walk.replace(item))
    try:
        data = marshal.dumps(skeleton[0] if head is None else (*head, *skeleton), _MARSHAL_VERSION)
    except ValueError:
        raise NotPlain from None  # nested too deeply
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
    """Give the objects that marks stand for their places in the tables."""
    unique = {id(obj): obj for obj in met}.values()
    references = [obj for obj in unique if isinstance(obj, Reference)]
    objects = [obj for obj in unique if not isinstance(obj, Reference)]
    content.references, content.objects = references, objects
    if len(unique) == len(met) and all(map(operator.is_, met, chain(references, objects))):
        return
    numbers = {id(obj): number for number, obj in enumerate(chain(references, objects))}
    content.slots = [numbers[id(obj)] for obj in met]
