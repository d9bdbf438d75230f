"""Incoming messages of one worker: header fields, references, and contents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import FrameError
from mpidist.rpc import data_codec, decoder, interceptor, message
from mpidist.rpc.allowlist import Allowed
from mpidist.rpc.message import ANNOUNCED, AUTOGRAD, FAR, REFERENCES, WORD, ReferenceRow
from mpidist.rpc.pickles import Reference
from mpidist.rpc.rref_store import require_own


class Reader:
    """Reads the messages that arrive at one worker.

    Args:
        allowed: The list of this worker; None if it reads pickles.

    Attributes:
        make_reference: Makes a reference from (reference, fork, owner's rank).
    """

    def __init__(self, allowed: Allowed | None) -> None:
        self.make_reference: Callable[[int, int, int], Reference] = _no_references
        self._decoder: Any = decoder if allowed is None else data_codec.DataDecoder(allowed)

    def unpack_preamble(self, incoming: Incoming) -> list[ReferenceRow]:
        """Take autograd's number and the references off the header of a message that has just arrived; return the references.

        Raises:
            FrameError: They are cut off.
        """
        number = 0
        rows: list[ReferenceRow] = []
        if incoming.flags & AUTOGRAD:
            (number,) = message.unpack_ids(incoming.data, incoming.start, incoming.end, 1)
            incoming.start += WORD.size
        if incoming.flags & REFERENCES:
            rows, incoming.start = message.unpack_references(incoming.data, incoming.start)
        incoming.noted = number, rows
        return rows

    def references_in(self, incoming: Incoming) -> list[ReferenceRow]:
        """Return the references of a message; those that were announced once it is complete.

        None where they cannot be read.
        """
        if incoming.flags & REFERENCES:
            return incoming.noted[1] if incoming.noted is not None else []
        if incoming.flags & ANNOUNCED and incoming.is_complete and incoming.parts:
            with contextlib.suppress(FrameError):
                return _unpack_announced(incoming, incoming.parts[0], 0)[0]
        return []

    def decode(self, incoming: Incoming, place: int, is_answer: bool) -> Any:
        """Return the object that a complete message holds.

        Args:
            place: Where its content begins in the header.

        Raises:
            FrameError: The message does not hold what it announces.
            Exception: What unpickling raises.
        """
        flags, body, parts = incoming.flags, incoming.data, incoming.parts
        if parts:
            incoming.bring()
        if flags & FAR:
            if not parts:
                raise FrameError(f"a message of kind {incoming.kind} without its content")
            body, place, parts = parts[0], 0, parts[1:]
        elif incoming.end != len(body):
            body = body[: incoming.end]  # packed parts stand behind it
        if place == len(body):
            return None
        references: Sequence[Any] = ()
        if flags & REFERENCES:
            references = [self.make_reference(*row) for row in incoming.noted[1]]
        elif flags & ANNOUNCED:
            rows, place = _unpack_announced(incoming, body, place)
            references = [self.make_reference(*row) for row in rows]
        attach = None
        if flags & AUTOGRAD and (engine := interceptor.engine) is not None:
            attach = partial(_attach_autograd, engine, incoming, incoming.noted[0], is_answer)
        return self._decoder.decode(flags, body, place, parts, references, attach)

    def decode_call(self, incoming: Incoming, place: int) -> tuple[Any, Any]:
        """Return the args and kwargs of a complete request.

        Args:
            place: Where its content begins in the header.

        Raises:
            FrameError: The message does not hold what it announces.
            Exception: What unpickling raises.
        """
        flags = incoming.flags
        if not flags and place == incoming.end:
            return (), {}
        data = self.decode(incoming, place, False)
        if data is None:
            return (), {}
        made: tuple[Any, Any] = self._decoder.arguments(flags, data)
        return made

    def decode_answer(self, incoming: Incoming) -> Any:
        """Return the object that an answer holds."""
        place = incoming.start
        return (
            None
            if place == incoming.end and not incoming.flags
            else self.decode(incoming, place, True)
        )


def _unpack_announced(incoming: Incoming, body: Any, place: int) -> tuple[list[ReferenceRow], int]:
    rows, place = message.unpack_announced(body, place)
    require_own(incoming.source, [fork for _, fork, _ in rows])
    return rows, place


def _no_references(*args: Any) -> Any:
    raise FrameError("references in a message of a worker that has none")


def _attach_autograd(
    engine: Any, incoming: Incoming, number: int, is_answer: bool, tensors: list[Any]
) -> list[Any]:
    return engine.arriving(incoming.context, incoming.source, number, tensors, is_answer)
