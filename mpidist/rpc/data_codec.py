"""Data-only codec, for workers with a list: replaces ``codec`` and ``decoder``.

The content begins with the same tensor table; its skeleton is in ``comm/serialization/data_format``
with the extension types of ``data_values``. Nothing is pickled: an object that is not data raises
an error at the sender, with the name of the argument. The decoder makes data only, from any bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from mpidist.comm.serialization import data_reader, data_writer, inline_rows, tensor_rebuild
from mpidist.comm.serialization.data_format import NATIVE, NUMBER, OBJECT
from mpidist.comm.serialization.data_writer import Ext, encode
from mpidist.comm.serialization.inline_rows import COUNTS_OF_ONE
from mpidist.comm.serialization.tensor_format import Buffer, Part, Tabled
from mpidist.errors import FrameError, NotPlainData
from mpidist.rpc import callee, decoder, remote_error
from mpidist.rpc.allowlist import Allowed, Refused
from mpidist.rpc.codec import (
    EMPTY,
    KEYWORDS,
    PICKLED,
    SLOTS,
    TABLE,
    Args,
    Content,
    Kwargs,
    Tensor,
)
from mpidist.rpc.data_values import REFERENCE, Reading, Writing
from mpidist.rpc.decoder import Attach
from mpidist.rpc.pickles import Reference

_MARKS = [Ext(OBJECT, NUMBER.pack(number)) for number in range(8)]
_REFERENCES = [Ext(REFERENCE, encode([number])) for number in range(8)]
LONE_MARK = encode(_MARKS[0])
LONE_ARGUMENT = encode(_MARKS[:1])
_POSITIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


class DataEncoder:
    """Encoder of the messages to one worker with a list (see ``codec.Encoder``).

    Args:
        worker: The name of that worker, for errors.
    """

    __slots__ = ("_reads",)

    def __init__(self, worker: str) -> None:
        self._reads = f"and {worker} reads data only (it has a list: init_rpc(..., allowed=[...]))"

    def encode_function(self, function: object, name: bytes, args: Args, kwargs: Kwargs) -> Content:
        """Encode a call's arguments.

        Args:
            function: For errors.
            name: The function's wire name; a function without one cannot be sent.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            NotPlainData: An argument is not data (the error names it), or the function has no
                importable name.
        """
        if len(name) <= 2:
            raise NotPlainData(f"{function!r} has no importable name, {self._reads}")
        if type(args) is not tuple:
            args = tuple(args or ())
        if not kwargs:
            if not args:
                return EMPTY
            if (
                len(args) == 1
                and type(args[0]) is Tensor
                and (row := inline_rows.inline_row(args[0])) is not None
            ):
                return Content(0, LONE_ARGUMENT, (COUNTS_OF_ONE, *row), args)
            if NATIVE.issuperset(map(type, args)):
                try:
                    return Content(0, encode(args))
                except (OverflowError, UnicodeEncodeError):
                    pass
            items, flags = list(args), 0
        else:
            items, flags = [list(kwargs), *args, *kwargs.values()], KEYWORDS
        try:
            return _encode_flat(flags, items) or _encode_walked(flags, items)
        except NotPlainData as error:
            place = _argument_name(function, error.place, len(args), list(kwargs or ()))
            raise NotPlainData(f"{error.reason}, {self._reads}", place) from None

    def encode(self, obj: object) -> Content:
        """Encode a result.

        Raises:
            NotPlainData: The result is not data.
        """
        if obj is None:
            return EMPTY
        if type(obj) is Tensor and (row := inline_rows.inline_row(obj)) is not None:
            return Content(0, LONE_MARK, (COUNTS_OF_ONE, *row), (obj,))
        try:
            return _encode_walked(0, obj)
        except NotPlainData as error:
            raise NotPlainData(
                f"{error.reason}, {self._reads}", f"the result or value{error.place}"
            ) from None

    def describe_error(self, error: BaseException) -> object:
        """Return an exception as data, for ``remote_error.rebuild``."""
        return remote_error.describe(error, as_data=True)


def _encode_flat(flags: int, items: list[Any]) -> Content | None:
    """Encode arguments if they are distinct references, small tensors and native data; else None.

    A shortcut of ``_encode_walked`` for most calls with references.
    """
    skeleton: list[object] = []
    objects: list[Any] = []
    references: list[Reference] = []
    for item in items:
        kind = type(item)
        if kind in NATIVE:
            skeleton.append(item)
        elif kind is Tensor and len(objects) < len(_MARKS):
            skeleton.append(_MARKS[len(objects)])
            objects.append(item)
        elif isinstance(item, Reference) and len(references) < len(_REFERENCES):
            skeleton.append(_REFERENCES[len(references)])
            references.append(item)
        else:
            return None
    if len({*map(id, objects), *map(id, references)}) != len(objects) + len(references):
        return None
    table = inline_rows.inline_table(objects) if objects else ()
    if table is None:
        return None
    try:
        content = Content(flags, encode(skeleton), table, objects)
    except (OverflowError, UnicodeEncodeError):
        return None
    content.references = references
    return content


def _encode_walked(flags: int, obj: object) -> Content:
    objects: list[Tabled] = []
    writing = Writing()
    content = Content(flags, data_writer.dumps(obj, objects, writing.extend))
    content.references = writing.references
    if objects:
        content.objects = objects
        content.table = inline_rows.inline_table(objects)
        content.is_dense = True
    return content


def _argument_name(function: Any, place: str, positional: int, keywords: list[str]) -> str:
    """Return the argument at a place in [keywords, *positional, *values], for errors."""
    head, _, rest = place.partition("]")
    number = int(head[1:]) - bool(keywords) if head[1:].isdecimal() else 0
    if number >= positional:
        return f"argument {keywords[number - positional]!r}{rest}"
    if type(function) is callee.Method:
        return f"argument {number - 1}{rest}"  # without the reference
    try:
        parameters = list(inspect.signature(function).parameters.values())[: number + 1]
    except (TypeError, ValueError):
        parameters = []  # a builtin function
    if number < len(parameters) and parameters[number].kind in _POSITIONAL:
        return f"argument {parameters[number].name!r}{rest}"
    return f"argument {number}{rest}"


class DataDecoder:
    """Decoder of a worker with a list (see ``reader.Decoder``).

    Args:
        allowed: The list.
    """

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._without_references = Reading((), allowed).extend

    def decode(
        self,
        flags: int,
        body: Buffer,
        place: int,
        parts: Sequence[Part],
        references: Sequence[Reference] = (),
        attach: Attach | None = None,
    ) -> Any:
        """Decode a content as ``decoder.decode`` does; a call's arguments are a list.

        Raises:
            Refused: The content is a pickle, or has a name that is not in the list.
            FrameError: The content is not valid data.
        """
        if flags & (PICKLED | SLOTS):
            raise Refused(
                "a pickle came to a worker that reads data only (init_rpc(..., allowed=[...]))"
            )
        objects: list[Tabled] = []
        used = 0
        if flags & TABLE:
            if (lone := tensor_rebuild.read_lone(body, place)) is not None:
                tensor, place = lone
                # A shortcut for most messages with tensors.
                if flags == TABLE and attach is None and not references and not parts:
                    rest = body[place:]
                    if rest == LONE_ARGUMENT:
                        return [tensor]
                    if rest == LONE_MARK:
                        return tensor
                objects = [tensor]
            else:
                objects, used, place = tensor_rebuild.read(body, place, parts, is_strict=True)
            if attach is not None:
                objects = decoder.attach_tensors(objects, attach)
        if used != len(parts):
            raise FrameError(f"{len(parts)} parts came, of which the table describes {used}")
        extend = (
            Reading(references, self._allowed).extend if references else self._without_references
        )
        return data_reader.loads(memoryview(body)[place:], objects, extend)

    def arguments(self, flags: int, data: object) -> tuple[Sequence[object], dict[str, object]]:
        """Return the args and kwargs of a decoded call.

        Raises:
            FrameError: The data is not a call's arguments.
        """
        if type(data) is not list:
            raise FrameError(f"a {type(data).__name__} in the place of a call's arguments")
        if not flags & KEYWORDS:
            return data, {}
        names = data[0] if data else None
        if (
            type(names) is not list
            or len(names) >= len(data)
            or not all(type(name) is str for name in names)
        ):
            raise FrameError("a call's keywords are none")
        first = len(data) - len(names)
        kwargs = dict(zip(names, data[first:], strict=True))
        if len(kwargs) != len(names):
            raise FrameError("a call's keywords occur twice")
        return data[1:first], kwargs
