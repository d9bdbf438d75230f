"""Encoded messages on their way out and in: device maps, distributed autograd's hooks, and references."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist.comm.transport.eager_message import HEADER_BYTES
from mpidist.comm.transport.transport import Transport
from mpidist.errors import FrameError
from mpidist.rpc import codec, data_codec, interceptor, message
from mpidist.rpc.codec import EMPTY, TABLE, Content
from mpidist.rpc.message import (
    ANNOUNCED,
    AUTOGRAD,
    FAR,
    FIRST_ONE_WAY,
    FIRST_RESPONSE,
    MAX_REFERENCES,
    REFERENCES,
    ROOM_BYTES,
    WORD,
)

DeviceMap = Mapping[int, int]
_REQUEST_GRADIENTS = int(message.Kind.REQUEST_GRADIENTS)
_COMPACT_BYTES = ROOM_BYTES - message.ONE_REFERENCE.size


class Wire:
    """Messages of one worker.

    Args:
        transport: Carries them.
        request_maps: By rank: from this worker's device indices to the receiver's, for requests.
        answer_maps: For answers.
        data_only: The workers that read data only: their names by rank.

    Attributes:
        codecs: By rank: what encodes messages to a worker.
        answered: Requests that were answered.
        one_way_sent: One-way messages that were sent.
        is_stopped: Nothing is sent any more.
        announce: Sends an owner the (reference, fork) pairs of a message that follows.
    """

    def __init__(
        self,
        transport: Transport,
        request_maps: Mapping[int, DeviceMap],
        answer_maps: Mapping[int, DeviceMap],
        data_only: Mapping[int, str] | None = None,
    ) -> None:
        self.codecs: list[Any] = [codec] * transport.size
        for rank, name in (data_only or {}).items():
            self.codecs[rank] = data_codec.DataEncoder(name)
        self.answered = self.one_way_sent = 0
        self.is_stopped = False
        self._count_lock = threading.Lock()
        self.announce: Callable[[int, Sequence[tuple[int, int]]], None] = _no_references
        self._request_maps = request_maps
        self._answer_maps = answer_maps
        self._send = transport.send

    def has_device_map(self, to: int) -> bool:
        """Say whether requests to a worker can carry CUDA tensors, and its answers to them."""
        return bool(self._request_maps.get(to))

    def post(
        self,
        to: int,
        kind: int,
        sequence: int = 0,
        context: int = 0,
        prefix: bytes = b"",
        content: Content = EMPTY,
    ) -> None:
        """Send a message.

        Args:
            sequence: Of a request; an answer carries it back.
            context: Of distributed autograd; 0 for none.
            prefix: The header in front of the content.

        Raises:
            Exception: It cannot be sent; nothing was.
        """
        table, references = content.table, content.references
        if table is None or content.slots or content.buffers or len(references) > 1:
            self._post(to, kind, sequence, context, prefix, content)
            return
        flags, body = content.flags, content.skeleton
        if table:
            flags |= TABLE
            body = b"".join((*table, body))
        if len(prefix) + len(body) > _COMPACT_BYTES:
            self._post(to, kind, sequence, context, prefix, content)
            return
        number = 0
        if references or context:
            if references:
                references[0].require_shareable()
            # Last of all: nothing can fail any more, and nothing is recorded or counted that never
            # comes to be.
            if context and (number := _record_send(to, kind, context, content)):
                flags |= AUTOGRAD
            if references:
                prefix = message.ONE_REFERENCE.pack(1, *references[0].fork(to)) + prefix
                flags |= REFERENCES
            if number:
                prefix = WORD.pack(number) + prefix
        self._send(to, kind, sequence, context, flags, prefix + body)

    def answer(self, to: int, kind: int, sequence: int, context: int, content: Content) -> None:
        """Answer a request; nothing once RPC is stopped.

        Raises:
            Exception: It cannot be sent; nothing was.
        """
        if not self.is_stopped:
            self.post(to, kind, sequence, context, b"", content)
        with self._count_lock:
            self.answered += 1

    def count_answer(self) -> None:
        """Count a request as answered."""
        with self._count_lock:
            self.answered += 1

    def post_one_way(
        self, to: int, kind: int, prefix: bytes, content: Content = EMPTY, context: int = 0
    ) -> None:
        """Send a message that is not answered, counted for quiescence; nothing once RPC is stopped.

        Raises:
            Exception: It cannot be sent; nothing was.
        """
        if self.is_stopped:
            return
        with self._count_lock:
            self.one_way_sent += 1
        try:
            self.post(to, kind, 0, context, prefix, content)
        except BaseException:
            with self._count_lock:
                self.one_way_sent -= 1
            raise

    def _post(
        self, to: int, kind: int, sequence: int, context: int, prefix: bytes, content: Content
    ) -> None:
        goes_back = FIRST_RESPONSE <= kind < FIRST_ONE_WAY or kind == _REQUEST_GRADIENTS
        maps = self._answer_maps if goes_back else self._request_maps
        flags, body, parts, devices = content.body(maps.get(to))
        for reference in content.references:
            reference.require_shareable()
        number = _record_send(to, kind, context, content) if context else 0
        if number:
            flags |= AUTOGRAD
            prefix = WORD.pack(number) + prefix
        if content.references:
            # Last of all: nothing can fail any more, and no holder is counted that never comes to
            # be.
            flags, prefix, body = self._with_references(
                to, flags, prefix, body, content.references, number
            )
        nbytes = len(prefix) + len(body)
        # Announced references begin a content that is a part, whatever its size.
        if flags & FAR or nbytes > (HEADER_BYTES if parts else ROOM_BYTES):
            self._send(
                to, kind, sequence, context, flags | FAR, prefix, [body, *parts], [None, *devices]
            )
        else:
            self._send(to, kind, sequence, context, flags, prefix + body, parts, devices)

    def _with_references(
        self,
        to: int,
        flags: int,
        prefix: bytes,
        body: bytes,
        references: Sequence[Any],
        number: int,
    ) -> tuple[int, bytes, bytes]:
        rows = [reference.fork(to) for reference in references]
        if len(rows) > MAX_REFERENCES:
            self.announce(to, [(reference, fork) for reference, fork, owner in rows if owner == to])
            return flags | ANNOUNCED | FAR, prefix, message.pack_announced(rows) + body
        table = message.pack_references(rows)
        first = WORD.size if number else 0
        return flags | REFERENCES, prefix[:first] + table + prefix[first:], body


def _record_send(to: int, kind: int, context: int, content: Content) -> int:
    """Have distributed autograd record a message; return its number there, 0 if no tensor needs a gradient."""
    engine = interceptor.engine
    if engine is None:
        return 0
    tensors = [obj for obj in content.objects if isinstance(obj, codec.Tensor)]
    return engine.leaving(context, to, tensors, FIRST_RESPONSE <= kind < FIRST_ONE_WAY)


def _no_references(*args: Any) -> Any:
    raise FrameError("references in a message of a worker that has none")
