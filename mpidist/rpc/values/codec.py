"""Encoding and decoding of arguments and results: data, a tensor and a reference table.

Data is written in MessagePack (``comm/serialization/data_format``), which names no code. Tensors,
parameters, arrays, bytearrays and references stand in it by their numbers in the tables. An object
that holds anything else, or one list, dict, tuple or set twice, is pickled as a whole; its tensors
and references are still in the tables. Functions and classes are pickled by name; those without an
importable name need cloudpickle. Workers with a list are sent no pickles (``data_codec``), and
read none (``Decoder``). See docs/decisions/0012, 0017 and 0019.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from mpidist.comm.serialization import (
    data_reader,
    data_writer,
    inline_rows,
    tensor_rebuild,
    tensor_table,
)
from mpidist.comm.serialization.data_format import NATIVE, NUMBER, OBJECT
from mpidist.comm.serialization.data_writer import Ext, Inexact
from mpidist.comm.serialization.inline_rows import COUNTS_OF_ONE
from mpidist.comm.serialization.tensor_format import HOST, Buffer, Part, Tabled
from mpidist.errors import FrameError, NotPlainData
from mpidist.rpc.names.allowlist import Allowed, Refused
from mpidist.rpc.values import pickles, remote_error
from mpidist.rpc.values.data_values import (
    REFERENCE,
    ExtensionReader,
    NotAReference,
    ReferenceWriter,
)
from mpidist.rpc.values.pickles import Reference

Tensor = torch.Tensor

# Flags of a message, for the layout of its content.
PICKLED = 1  # the skeleton is a pickle
KEYWORDS = 2  # a call's skeleton begins with the names of its last arguments
TABLE = 4  # a tensor table precedes the skeleton
PLAIN = 8  # the skeleton has MessagePack's own types alone

_write = data_writer.encode
_NAMES = frozenset({str})
_MARKS = [Ext(OBJECT, NUMBER.pack(number)) for number in range(8)]
_REFERENCES = [Ext(REFERENCE, NUMBER.pack(number)) for number in range(8)]
LONE_MARK = _write(_MARKS[0])
LONE_ARGUMENT = _write(_MARKS[:1])
# Raised for objects that are not written as data.
NOT_WRITTEN = (NotAReference, Inexact, NotPlainData)
_UNWRITABLE = (OverflowError, UnicodeEncodeError)  # by MessagePack's own types

Args: TypeAlias = Iterable[Any] | None
Kwargs: TypeAlias = Mapping[str, Any] | None
Attach = Callable[[list[Tensor]], list[Tensor]]  # replaces the tensors of a message


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
        skeleton: The data, or the pickle.
        table: The tensor table in pieces, if all objects are small; None if ``body`` writes it.
        objects: Tensors, parameters, arrays and bytearrays of the table. Distributed autograd
            records the tensors.
        references: Remote references.
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
    if not args and not kwargs:
        return EMPTY
    if type(args) is not tuple:
        args = tuple(args or ())
    try:
        content = encode_arguments(args, kwargs, ReferenceWriter, is_exact=True)
    except NOT_WRITTEN:
        return encode_pickled((args, kwargs or {}))
    return content if is_describable(content) else encode_pickled((args, kwargs or {}))


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
    if (content := encode_lone(obj)) is not None:
        return content
    try:
        content = encode_object(0, obj, ReferenceWriter, is_exact=True)
    except NOT_WRITTEN:
        return encode_pickled(obj)
    return content if is_describable(content) else encode_pickled(obj)


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


# What the encoders of all workers share.


def encode_lone(obj: Any) -> Content | None:
    """Encode None, data of MessagePack's own types, or a tensor; None for all else."""
    if obj is None:
        return EMPTY
    kind = type(obj)
    if kind in NATIVE:
        try:
            return Content(PLAIN, _write(obj))
        except _UNWRITABLE:
            return None
    if kind is Tensor:
        row = inline_rows.inline_row(obj)
        if row is not None:
            return Content(0, LONE_MARK, (COUNTS_OF_ONE, *row), (obj,))
        if tensor_table.is_describable(obj):
            return Content(0, LONE_MARK, None, (obj,))
    return None


def encode_object(
    flags: int, obj: object, writer_type: type[ReferenceWriter], is_exact: bool
) -> Content:
    """Encode an object as data; ``is_describable`` is to be asked of its tensors.

    Args:
        flags: Of the content.
        obj: The object; of a call, a list of its arguments.
        writer_type: Makes the writer of the message's extension types.
        is_exact: See ``data_writer.dumps``.

    Raises:
        Exception: One of ``NOT_WRITTEN``.
    """
    objects: list[Tabled] = []
    extensions = writer_type()
    data = data_writer.dumps(
        obj, objects, extensions.extend, checks_tensors=False, is_exact=is_exact
    )
    return _with_tables(Content(flags, data), objects, extensions)


def encode_arguments(
    args: tuple[Any, ...], kwargs: Kwargs, writer_type: type[ReferenceWriter], is_exact: bool
) -> Content:
    """Encode a call's arguments as ``encode_object`` does.

    Raises:
        TypeError: ``kwargs`` is not a mapping, or one of its keys is not a str.
        Exception: One of ``NOT_WRITTEN``.
    """
    skeleton: list[Any] = []
    flags = 0
    items = args
    if kwargs:
        has_names = _NAMES.issuperset(map(type, kwargs))
        if not has_names:
            _require_names(kwargs)
        flags = KEYWORDS
        items = (*args, *kwargs.values())
        skeleton.append(list(kwargs))
        if not has_names:  # a name of a subclass of str
            return encode_object(flags, [*skeleton, *items], writer_type, is_exact)
    elif len(args) == 1 and type(args[0]) is Tensor:
        row = inline_rows.inline_row(args[0])
        if row is not None:
            return Content(0, LONE_ARGUMENT, (COUNTS_OF_ONE, *row), args)
    try:
        if NATIVE.issuperset(map(type, items)):
            skeleton += items
            return Content(flags | PLAIN, _write(skeleton))
        objects: list[Tabled] = []
        extensions = writer_type()
        _convert(items, skeleton, objects, extensions, is_exact)
        return _with_tables(Content(flags, _write(skeleton)), objects, extensions)
    except _UNWRITABLE:
        before = (list(kwargs),) if kwargs else ()
        return encode_object(flags, [*before, *items], writer_type, is_exact)
    except RecursionError:
        raise NotPlainData("the arguments are nested too deeply") from None


def _require_names(kwargs: object) -> None:
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a mapping from names to values; got {kwargs!r}")
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"names in kwargs are of type str; got {name!r}")


def _convert(
    items: Iterable[Any],
    skeleton: list[Any],
    objects: list[Tabled],
    extensions: ReferenceWriter,
    is_exact: bool,
) -> None:
    """Append to ``skeleton`` what MessagePack encodes instead of ``items``."""
    writer = None
    numbers: dict[int, int] = {}
    for item in items:
        kind = type(item)
        if kind in NATIVE:
            skeleton.append(item)
        elif kind is Tensor and writer is None and len(objects) < len(_MARKS):
            number = numbers.setdefault(id(item), len(objects))
            if number == len(objects):
                objects.append(item)
            skeleton.append(_MARKS[number])
        elif isinstance(item, Reference) and len(extensions.references) < len(_REFERENCES):
            skeleton.append(_REFERENCES[extensions.number_of(item)])
        else:
            if writer is None:
                writer = data_writer.Writer(objects, extensions.extend, False, is_exact)
            try:
                skeleton.append(writer.convert(item))
            except NotPlainData as error:
                raise error.within(f"[{len(skeleton)}]") from None


def _with_tables(content: Content, objects: list[Tabled], extensions: ReferenceWriter) -> Content:
    content.references = extensions.references
    if objects:
        content.objects = objects
        content.table = inline_rows.inline_table(objects)
    return content


def is_describable(content: Content) -> bool:
    """Return whether the tensor table can describe a content's tensors."""
    return content.table is not None or all(map(tensor_table.is_describable, content.objects))


class Decoder:
    """Decoder of the messages to one worker.

    Args:
        allowed: The list of the worker, which reads data only; None if it reads pickles.
    """

    def __init__(self, allowed: Allowed | None) -> None:
        self._allowed = allowed
        self._without_references = ExtensionReader((), allowed).extend

    def decode(
        self,
        flags: int,
        body: Buffer,
        offset: int,
        parts: Sequence[Part],
        references: Sequence[Reference] = (),
        attach: Attach | None = None,
    ) -> Any:
        """Decode the content that ``Content.body`` has written.

        Tensors and arrays keep the memory in which they were received.

        Args:
            flags: Of the message.
            body: A ``bytearray``, or a view of one, that ends with the content.
            offset: The offset of the content in ``body``.
            parts: The parts of the message, in order.
            references: The references of the message.
            attach: Takes all tensors and returns their replacements; for distributed autograd.

        Returns:
            The object; of a call, what ``arguments`` takes.

        Raises:
            FrameError: The content is not valid data, or its tables do not match what came.
            Refused: The worker has a list, and the content is a pickle, or has a name that is not
                in the list.
            Exception: Unpickling has failed.
        """
        if flags & PLAIN and not flags & (PICKLED | TABLE):
            return data_reader.loads_plain(body[offset:])
        is_strict = self._allowed is not None
        if is_strict and flags & PICKLED:
            raise Refused(
                "a pickle came to a worker that reads data only (init_rpc(..., allowed=[...]))"
            )
        objects: list[Tabled] = []
        used = 0
        if flags & TABLE:
            if (lone := tensor_rebuild.read_lone(body, offset)) is not None:
                tensor, offset = lone
                # A shortcut for most messages with tensors.
                if flags == TABLE and attach is None and not references and not parts:
                    rest = body[offset:]
                    if rest == LONE_ARGUMENT:
                        return [tensor]
                    if rest == LONE_MARK:
                        return tensor
                objects = [tensor]
            else:
                objects, used, offset = tensor_rebuild.read(
                    body, offset, parts, is_strict=is_strict
                )
            if attach is not None:
                objects = _attach_tensors(objects, attach)
        if flags & PICKLED:
            return pickles.loads(body[offset:], objects, references, parts[used:])
        if used != len(parts):
            raise FrameError(f"{len(parts)} parts came, of which the table describes {used}")
        extend = (
            ExtensionReader(references, self._allowed).extend
            if references
            else self._without_references
        )
        return data_reader.loads(body[offset:], objects, extend)


def _attach_tensors(objects: list[Tabled], attach: Attach) -> list[Tabled]:
    """Return the objects of a table, with the tensors replaced by those from ``attach``."""
    tensors = [obj for obj in objects if isinstance(obj, Tensor)]
    if not tensors:
        return objects
    following = iter(attach(tensors))
    return [next(following) if isinstance(obj, Tensor) else obj for obj in objects]


def arguments(flags: int, data: Any) -> tuple[Sequence[object], dict[str, object]]:
    """Return the args and kwargs of a decoded call.

    Raises:
        FrameError: The data is not a call's arguments.
    """
    if flags & PICKLED:
        args, kwargs = data
        return args, kwargs
    if type(data) is not list:
        raise FrameError(f"a {type(data).__name__} in the place of a call's arguments")
    if not flags & KEYWORDS:
        return data, {}
    names = data[0] if data else None
    if type(names) is not list or len(names) >= len(data) or not {str}.issuperset(map(type, names)):
        raise FrameError("a call's keywords are none")
    first = len(data) - len(names)
    kwargs = dict(zip(names, data[first:], strict=True))
    if len(kwargs) != len(names):
        raise FrameError("a call's keywords occur twice")
    return data[1:first], kwargs
