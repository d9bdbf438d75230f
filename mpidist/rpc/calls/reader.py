"""Incoming messages of one worker: header fields, references, and contents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import FrameError
from mpidist.rpc import message
from mpidist.rpc.message import ANNOUNCED, AUTOGRAD, FAR, REFERENCES, WORD, ReferenceRow
from mpidist.rpc.names.allowlist import Allowed
from mpidist.rpc.rref_store import require_own
from mpidist.rpc.threads import interceptor
from mpidist.rpc.values import codec
from mpidist.rpc.values.pickles import Reference


class Reader:
    """Decodes the messages that arrive at one worker.

    Args:
        allowed: The list of this worker; None if it reads pickles.

    Attributes:
        make_reference: Makes a reference from (reference, fork, owner's rank).
    """

    def __init__(self, allowed: Allowed | None) -> None:
        self.make_reference: Callable[[int, int, int], Reference] = _no_references
        self._decode = codec.Decoder(allowed).decode

    def unpack_preamble(self, incoming: Incoming) -> list[ReferenceRow]:
        """Unpack autograd's number and the references from the header of a new message.

        Returns:
            The references; the header of the message begins behind them from now on.

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
        incoming.preamble = number, rows
        return rows

    def references_in(self, incoming: Incoming) -> Sequence[ReferenceRow]:
        """Return the references of a message; announced ones only once the message is complete.

        Returns:
            An empty sequence also if they cannot be read.
        """
        if incoming.flags & REFERENCES:
            return incoming.preamble[1]
        if incoming.flags & ANNOUNCED and incoming.is_complete and incoming.parts:
            with contextlib.suppress(FrameError):
                return _unpack_announced(incoming, incoming.parts[0], 0)[0]
        return []

    def decode(self, incoming: Incoming, offset: int, is_answer: bool) -> Any:
        """Decode the content of a complete message.

        Args:
            incoming: The message.
            offset: The offset of the content in the header.
            is_answer: The message answers a request.

        Raises:
            FrameError: The message is shorter or longer than its tables describe.
            Exception: Unpickling has failed.
        """
        flags, body, parts = incoming.flags, incoming.data, incoming.parts
        if parts:
            incoming.to_devices()
        if flags & FAR:
            if not parts:
                raise FrameError(f"a message of kind {incoming.kind} without its content")
            body, offset, parts = parts[0], 0, parts[1:]
        elif incoming.end != len(body):
            body = body[: incoming.end]  # without the packed parts
        if offset == len(body):
            return None
        references: Sequence[Reference] = ()
        if flags & REFERENCES:
            references = [self.make_reference(*row) for row in incoming.preamble[1]]
        elif flags & ANNOUNCED:
            rows, offset = _unpack_announced(incoming, body, offset)
            references = [self.make_reference(*row) for row in rows]
        attach = None
        if flags & AUTOGRAD and (engine := interceptor.engine) is not None:
            attach = partial(_attach_autograd, engine, incoming, incoming.preamble[0], is_answer)
        return self._decode(flags, body, offset, parts, references, attach)

    def decode_call(
        self, incoming: Incoming, offset: int
    ) -> tuple[Sequence[object], dict[str, object]]:
        """Decode the args and kwargs of a complete request.

        Args:
            incoming: The message.
            offset: The offset of the content in the header.

        Raises:
            FrameError: The message is shorter or longer than its tables describe.
            Exception: Unpickling has failed.
        """
        flags = incoming.flags
        if not flags and offset == incoming.end:
            return (), {}
        data = self.decode(incoming, offset, False)
        if data is None:
            return (), {}
        return codec.arguments(flags, data)

    def decode_answer(self, incoming: Incoming) -> Any:
        """Decode the content of an answer."""
        offset = incoming.start
        return (
            None
            if offset == incoming.end and not incoming.flags
            else self.decode(incoming, offset, True)
        )


def _unpack_announced(incoming: Incoming, body: Any, offset: int) -> tuple[list[ReferenceRow], int]:
    rows, offset = message.unpack_announced(body, offset)
    require_own(incoming.source, [fork for _, fork, _ in rows])
    return rows, offset


def _no_references(*args: int) -> Reference:
    raise FrameError("references in a message of a worker that has none")


def _attach_autograd(
    engine: interceptor.Interceptor,
    incoming: Incoming,
    number: int,
    is_answer: bool,
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:
    return engine.arriving(incoming.context, incoming.source, number, tensors, is_answer)
