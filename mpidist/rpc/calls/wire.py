"""Outgoing messages of one worker: headers, references, device maps, and autograd's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from mpidist.comm.serialization.tensor_format import HOST
from mpidist.comm.transport.eager_message import HEADER_BYTES
from mpidist.comm.transport.transport import Transport
from mpidist.rpc import message
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
from mpidist.rpc.threads import interceptor
from mpidist.rpc.values import codec
from mpidist.rpc.values.codec import EMPTY, TABLE, Content
from mpidist.rpc.values.pickles import Reference

DeviceMap = Mapping[int, int]
_REQUEST_GRADIENTS = int(message.Kind.REQUEST_GRADIENTS)
_COMPACT_BYTES = ROOM_BYTES - message.ONE_REFERENCE.size


class Wire:
    """Sends the messages of one worker.

    Args:
        transport: Sends the bytes.
        request_maps: Device maps for requests by rank: index here to index at the receiver;
            ``HOST`` stands for host memory.
        answer_maps: Device maps for answers.
        data_only: The names, by rank, of the workers that read data only.

    Attributes:
        data_only: For each rank, the worker's name if it reads data only, else None; for ``codec``.
        answered: The number of requests that this worker has answered.
        one_way_sent: The number of one-way messages that this worker has sent.
        is_stopped: RPC has ended: answers and one-way messages are discarded.
        announce: Sends the (reference, fork) pairs of a message to their owner ahead of the
            message; set by ``References``.
    """

    def __init__(
        self,
        transport: Transport,
        request_maps: Mapping[int, DeviceMap],
        answer_maps: Mapping[int, DeviceMap],
        data_only: Mapping[int, str] | None = None,
    ) -> None:
        self.data_only = [(data_only or {}).get(rank) for rank in range(transport.size)]
        self.answered = self.one_way_sent = 0
        self.is_stopped = False
        self._count_lock = threading.Lock()
        self.announce: Callable[[int, int, Sequence[tuple[int, int]]], None]
        self._request_maps = request_maps
        self._answer_maps = answer_maps
        # Host tensors of some messages go to devices, and do not travel within the header.
        self._maps_host = any(
            HOST in one for one in (*request_maps.values(), *answer_maps.values())
        )
        self._send = transport.send

    def has_device_map(self, to: int) -> bool:
        """Return whether requests to a worker, and its answers, can carry CUDA tensors."""
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
            to: The receiver's rank.
            kind: See ``message.Kind``.
            sequence: The number of a request, which its answer repeats.
            context: The context of distributed autograd; 0 for none.
            prefix: The fields of the header that belong to the kind.
            content: The encoded object.

        Raises:
            Exception: The message cannot be sent; nothing has been sent.
        """
        table, references = content.table, content.references
        if table is None or content.buffers or len(references) > 1 or (table and self._maps_host):
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
            # Done last, when nothing can fail any more: a message that is not sent must be neither
            # recorded by autograd nor counted as a fork.
            if context and (number := _record_send(to, kind, context, content)):
                flags |= AUTOGRAD
            if references:
                prefix = message.ONE_REFERENCE.pack(1, *references[0].fork(to)) + prefix
                flags |= REFERENCES
            if number:
                prefix = WORD.pack(number) + prefix
        self._send(to, kind, sequence, context, flags, prefix + body)

    def require_sendable(self, to: int, content: Content) -> None:
        """Raise what a request with this content would raise; send nothing.

        Raises:
            Exception: A tensor on a device without a map, or a reference that was deleted.
        """
        content.body(self._request_maps.get(to))
        for reference in content.references:
            reference.require_shareable()

    def answer(self, to: int, kind: int, sequence: int, context: int, content: Content) -> None:
        """Answer a request; do nothing once RPC has ended.

        Raises:
            Exception: The answer cannot be sent; nothing has been sent.
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
        """Send a message without an answer, counted for quiescence; do nothing once RPC has ended.

        Raises:
            Exception: The message cannot be sent; nothing has been sent.
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
            # Done last, when nothing can fail: a fork that is not sent must not be counted.
            flags, prefix, body = self._with_references(
                to, flags, prefix, body, content.references, number
            )
        nbytes = len(prefix) + len(body)
        # A content that begins with announced references is always a part.
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
        references: Sequence[Reference],
        number: int,
    ) -> tuple[int, bytes, bytes]:
        rows = [reference.fork(to) for reference in references]
        if len(rows) > MAX_REFERENCES:
            own = [(reference, fork) for reference, fork, owner in rows if owner == to]
            self.announce(to, to, own)
            return flags | ANNOUNCED | FAR, prefix, message.pack_announced(rows) + body
        table = message.pack_references(rows)
        first = WORD.size if number else 0
        return flags | REFERENCES, prefix[:first] + table + prefix[first:], body


def _record_send(to: int, kind: int, context: int, content: Content) -> int:
    """Record a message with distributed autograd; return its number, 0 without gradients."""
    engine = interceptor.engine
    if engine is None:
        return 0
    tensors = [obj for obj in content.objects if isinstance(obj, codec.Tensor)]
    return engine.leaving(context, to, tensors, FIRST_RESPONSE <= kind < FIRST_ONE_WAY)
