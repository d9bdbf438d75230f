"""Decoding of arguments and results: the inverse of ``codec``."""

from __future__ import annotations

import marshal
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm.serialization import tensor_rebuild
from mpidist.comm.serialization.tensor_format import Buffer, Part, Tabled
from mpidist.errors import FrameError
from mpidist.rpc import pickles
from mpidist.rpc.codec import (
    COUNT,
    KEYWORDS,
    LONE_ARGUMENT,
    LONE_MARK,
    PICKLED,
    SLOTS,
    TABLE,
    Tensor,
)
from mpidist.rpc.pickles import Reference
from mpidist.rpc.plain_data import MARK, Filling

Attach = Callable[[list[Tensor]], list[Tensor]]  # replaces the tensors of a message


def decode(
    flags: int,
    body: Buffer,
    place: int,
    parts: Sequence[Part],
    references: Sequence[Reference] = (),
    attach: Attach | None = None,
) -> Any:
    """Decode the content that ``Content.body`` has written.

    Tensors and arrays keep the memory in which they were received.

    Args:
        flags: Of the message.
        body: A ``bytearray``, or a view of one, that ends with the content.
        place: The offset of the content in ``body``.
        parts: The parts of the message, in order.
        references: The references of the message.
        attach: Takes all tensors and returns their replacements; for distributed autograd.

    Returns:
        The object; of a call, the skeleton that ``arguments`` takes.

    Raises:
        FrameError: The tables do not match the received data.
        Exception: Unpickling has failed.
    """
    objects: list[Tabled] = []
    used = 0
    if flags & TABLE:
        if (lone := tensor_rebuild.read_lone(body, place)) is not None:
            tensor, place = lone
            # A shortcut for most messages with tensors.
            if flags == TABLE and not references and attach is None:
                rest = body[place:]
                if rest == LONE_MARK:
                    return tensor
                return (tensor,) if rest == LONE_ARGUMENT else _merge(rest, [tensor])
            objects = [tensor]
        else:
            objects, used, place = tensor_rebuild.read(body, place, parts)
        if attach is not None:
            objects = attach_tensors(objects, attach)
    if flags & PICKLED:
        return pickles.loads(body[place:], objects, references, parts[used:])
    met: Sequence[object] = [*references, *objects] if references else objects
    if flags & SLOTS:
        numbers, place = _read_slots(body, place)
        met = _select(met, numbers)
    return _merge(body[place:], met)


def _merge(skeleton: Buffer, met: Sequence[object]) -> object:
    """Return the data of a skeleton, its marks replaced by objects."""
    try:
        data = marshal.loads(skeleton)
    except (ValueError, EOFError, TypeError) as error:
        raise FrameError(f"{len(skeleton)} bytes are no data: {error}") from error
    if not met:
        return data
    if type(data) is tuple and data.count(MARK) == len(met):
        following = iter(met)
        return tuple([next(following) if item is MARK else item for item in data])
    return _fill(data, met)


def _select(met: Sequence[object], numbers: Sequence[int]) -> list[object]:
    try:
        return [met[number] for number in numbers]
    except IndexError as error:
        raise FrameError(f"slots beyond the {len(met)} objects that came with them") from error


def _fill(data: object, met: Sequence[object]) -> object:
    following = iter(met)
    try:
        filled = next(following) if data is MARK else Filling(following).fill(data)
    except StopIteration as error:
        raise FrameError(f"{len(met)} slots do not fit the data that came with them") from error
    if next(following, MARK) is not MARK:
        raise FrameError(f"{len(met)} slots do not fit the data that came with them")
    return filled


def attach_tensors(objects: list[Tabled], attach: Attach) -> list[Tabled]:
    """Return the objects of a table, with the tensors replaced by those from ``attach``."""
    tensors = [obj for obj in objects if isinstance(obj, Tensor)]
    if not tensors:
        return objects
    following = iter(attach(tensors))
    return [next(following) if isinstance(obj, Tensor) else obj for obj in objects]


def _read_slots(body: Buffer, place: int) -> tuple[array[int], int]:
    numbers = array("I")
    try:
        (count,) = COUNT.unpack_from(body, place)
        end = place + COUNT.size + numbers.itemsize * count
        if end > len(body):
            raise FrameError(f"{count} slots announced, cut off after {len(body)} bytes")
    except struct.error as error:
        raise FrameError("slots announced, and cut off") from error
    numbers.frombytes(memoryview(body)[place + COUNT.size : end])
    return numbers, end


def arguments(flags: int, data: Any) -> tuple[Sequence[object], dict[str, object]]:
    """Return the args and kwargs of a decoded call."""
    if flags & PICKLED:
        args, kwargs = data
        return args, kwargs
    if not flags & KEYWORDS:
        return data, {}
    names = data[0]
    first = len(data) - len(names)
    return data[1:first], dict(zip(names, data[first:], strict=True))
