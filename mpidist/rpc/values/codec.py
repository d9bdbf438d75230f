"""Encoding and decoding of arguments and results: data, a tensor and a reference table.

Data is written in MessagePack (``comm/serialization/data_format``), which names no code. Tensors,
parameters, arrays, bytearrays and references stand in it by their numbers in the tables. An object
that holds anything else, or one list, dict, tuple or set twice, is pickled as a whole; its tensors
and references are still in the tables. Functions and classes are pickled by name; those without an
importable name need cloudpickle.

Workers with a list are sent no pickles, and read none. An encoder takes the name of such a worker
as ``data_only``: an object that is not data raises an error at the sender, with the name of the
argument. The bytes of a message lead to data, tensors and references, and to functions, classes and
operators that are values of the receiver's list, found by their names as keys. See docs/decisions/
0012, 0017 and 0019.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

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
from mpidist.rpc.names import callee, services
from mpidist.rpc.names.allowlist import Allowed, Refused
from mpidist.rpc.values import pickles
from mpidist.rpc.values.data_values import (
    REFERENCE,
    ExtensionReader,
    ExtensionWriter,
    NotAReference,
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
_POSITIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)

Args: TypeAlias = Iterable[Any] | None
Kwargs: TypeAlias = Mapping[str, Any] | None
Attach = Callable[[list[Tensor]], list[Tensor]]  # replaces the tensors of a message


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


def encode_function(
    function: object, name: bytes, args: Args, kwargs: Kwargs, data_only: str | None = None
) -> Content:
    """Encode a call's arguments, and the function if it has no ``name`` (``callee.wire_name``).

    Args:
        function: The function.
        name: Its wire name.
        args: Positional arguments.
        kwargs: Keyword arguments.
        data_only: The name of the receiver if it reads data only.

    Raises:
        NotPlainData: ``data_only``, and an argument is no data, which the error names, or the
            function has no name.
        Exception: Function or arguments cannot be pickled.
    """
    is_named = len(name) > 2
    if is_named and not args and not kwargs:
        return EMPTY
    if type(args) is not tuple:
        args = tuple(args or ())
    if not is_named:
        if data_only is not None:
            raise NotPlainData(f"{function!r} has no importable name, {_reads(data_only)}")
        return encode_pickled((function, args, kwargs or {}))
    try:
        content = _encode_arguments(args, kwargs, data_only is not None)
        if _is_describable(content):
            return content
        if data_only is not None:
            _refuse([list(kwargs), *args, *kwargs.values()] if kwargs else list(args))
    except NOT_WRITTEN as error:
        if data_only is not None and isinstance(error, NotPlainData):
            place = _argument_name(function, error.place, len(args), list(kwargs or ()))
            raise NotPlainData(f"{error.reason}, {_reads(data_only)}", place) from None
    return encode_pickled((args, kwargs or {}))


def encode(obj: Any, data_only: str | None = None) -> Content:
    """Encode a result.

    Args:
        obj: The result.
        data_only: The name of the receiver if it reads data only.

    Raises:
        NotPlainData: ``data_only``, and the result is no data.
        Exception: The result cannot be pickled.
    """
    if (content := _encode_lone(obj)) is not None:
        if data_only is not None and content.table is None:
            content.is_dense = True
        return content
    try:
        content = _encode_object(0, obj, data_only is not None)
        if _is_describable(content):
            return content
        if data_only is not None:
            _refuse(obj)
    except NOT_WRITTEN as error:
        if data_only is not None and isinstance(error, NotPlainData):
            raise NotPlainData(
                f"{error.reason}, {_reads(data_only)}", f"the result or value{error.place}"
            ) from None
    return encode_pickled(obj)


def encode_pickled(obj: object) -> Content:
    """Encode an object by pickle.

    Raises:
        Exception: Pickling has failed, or cloudpickle is needed and not installed.
    """
    data, sink = pickles.dumps(obj)
    content = Content(PICKLED, data, None if sink.objects else (), sink.objects)
    content.references, content.buffers = sink.references, sink.buffers
    return content


def _encode_lone(obj: Any) -> Content | None:
    """Encode None, data of MessagePack's own types, or a tensor; None for all else."""
    if obj is None:
        return EMPTY
    kind = type(obj)
    if kind in NATIVE:
        try:
            return Content(PLAIN, _write(obj))
        except data_writer.UNENCODABLE:
            return None
    if kind is Tensor:
        row = inline_rows.inline_row(obj)
        if row is not None:
            return Content(0, LONE_MARK, (COUNTS_OF_ONE, *row), (obj,))
        if tensor_table.is_describable(obj):
            return Content(0, LONE_MARK, None, (obj,))
    return None


def _encode_object(flags: int, obj: object, is_data_only: bool) -> Content:
    """Encode an object as data; ``_is_describable`` is to be asked of its tensors.

    Args:
        flags: Of the content.
        obj: The object; of a call, a list of its arguments.
        is_data_only: The receiver reads data only. If not, what would not come over as it is gets a
            pickle.

    Raises:
        Exception: One of ``NOT_WRITTEN``.
    """
    objects: list[Tabled] = []
    extensions = ExtensionWriter(is_data_only)
    data = data_writer.dumps(
        obj, objects, extensions.extend, checks_tensors=False, is_exact=not is_data_only
    )
    return _with_tables(Content(flags, data), objects, extensions, is_data_only)


def _encode_arguments(args: tuple[Any, ...], kwargs: Kwargs, is_data_only: bool) -> Content:
    """Encode a call's arguments as ``_encode_object`` does.

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
            return _encode_object(flags, [*skeleton, *items], is_data_only)
    elif len(args) == 1 and type(args[0]) is Tensor:
        row = inline_rows.inline_row(args[0])
        if row is not None:
            return Content(0, LONE_ARGUMENT, (COUNTS_OF_ONE, *row), args)
    try:
        if NATIVE.issuperset(map(type, items)):
            skeleton += items
            return Content(flags | PLAIN, _write(skeleton))
        objects: list[Tabled] = []
        extensions = ExtensionWriter(is_data_only)
        _convert(items, skeleton, objects, extensions, not is_data_only)
        return _with_tables(Content(flags, _write(skeleton)), objects, extensions, is_data_only)
    except data_writer.UNENCODABLE:
        before = (list(kwargs),) if kwargs else ()
        return _encode_object(flags, [*before, *items], is_data_only)
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
    extensions: ExtensionWriter,
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


def _with_tables(
    content: Content, objects: list[Tabled], extensions: ExtensionWriter, is_dense: bool
) -> Content:
    content.references = extensions.references
    content.is_dense = is_dense
    if objects:
        content.objects = objects
        content.table = inline_rows.inline_table(objects)
    return content


def _is_describable(content: Content) -> bool:
    """Return whether the tensor table can describe a content's tensors."""
    return content.table is not None or all(map(tensor_table.is_describable, content.objects))


def _refuse(obj: object) -> NoReturn:
    """Raise the error for an object with a tensor that the table cannot describe."""
    data_writer.dumps(obj, [], ExtensionWriter(True).extend)
    raise NotPlainData.of(obj)


def _reads(worker: str) -> str:
    return f"and {worker} reads data only (it has a list: init_rpc(..., allowed=[...]))"


def _argument_name(function: Any, path: str, positional: int, keywords: list[str]) -> str:
    """Return the argument at a path in [keywords, *positional, *values], for errors."""
    head, _, rest = path.partition("]")
    number = int(head[1:]) - bool(keywords) if head[1:].isdecimal() else 0
    if number >= positional:
        return f"argument {keywords[number - positional]!r}{rest}"
    if type(function) is callee.Method:
        return f"argument {number - 1}{rest}"  # without the reference
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []  # a builtin function
    if type(function) is FunctionType and function in services.names:
        del parameters[0]  # the sender's rank, which the caller does not give
    if number < len(parameters) and parameters[number].kind in _POSITIONAL:
        return f"argument {parameters[number].name!r}{rest}"
    return f"argument {number}{rest}"


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
