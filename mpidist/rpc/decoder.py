"""Decoding of arguments and results: the inverse of ``codec``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm.serialization import data_reader, tensor_rebuild
from mpidist.comm.serialization.tensor_format import Buffer, Part, Tabled
from mpidist.errors import FrameError
from mpidist.rpc import pickles
from mpidist.rpc.allowlist import Allowed, Refused
from mpidist.rpc.codec import KEYWORDS, LONE_ARGUMENT, LONE_MARK, PICKLED, PLAIN, TABLE, Tensor
from mpidist.rpc.data_values import Reading
from mpidist.rpc.pickles import Reference

Attach = Callable[[list[Tensor]], list[Tensor]]  # replaces the tensors of a message


class Decoder:
    """Decoder of the messages to one worker.

    Args:
        allowed: The list of the worker, which reads data only; None if it reads pickles.
    """

    def __init__(self, allowed: Allowed | None) -> None:
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
            The object; of a call, what ``arguments`` takes.

        Raises:
            FrameError: The content is not valid data, or its tables do not match what came.
            Refused: The worker has a list, and the content is a pickle, or has a name that is not
                in the list.
            Exception: Unpickling has failed.
        """
        if flags & PLAIN and not flags & (PICKLED | TABLE):
            return data_reader.loads_plain(body[place:])
        is_strict = self._allowed is not None
        if is_strict and flags & PICKLED:
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
                objects, used, place = tensor_rebuild.read(body, place, parts, is_strict=is_strict)
            if attach is not None:
                objects = _attach_tensors(objects, attach)
        if flags & PICKLED:
            return pickles.loads(body[place:], objects, references, parts[used:])
        if used != len(parts):
            raise FrameError(f"{len(parts)} parts came, of which the table describes {used}")
        extend = (
            Reading(references, self._allowed).extend if references else self._without_references
        )
        return data_reader.loads(body[place:], objects, extend)


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
