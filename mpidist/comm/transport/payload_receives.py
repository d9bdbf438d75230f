"""Receives of the payloads that eager messages announce.

The announced size is checked before memory is allocated, and the size that arrives against the
announced one, because memory is reused and would otherwise hold bytes of another message. Memory
that is announced but not written costs address space only.

Payloads have no numbers: they are received in the order of the messages that announce them. A
payload for which memory is missing is received with length zero, so that later ones keep their
order. If a message does not say which payloads belong to it, the order is lost, and all later
messages of that rank with payloads are refused.

From senders that must not write to this process, a payload is matched first (MPI-4.1 §3.8.2) and
received with length zero if it is longer than announced: Open MPI would write past the end of the
receive (``matched_probe``).
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import BufferPool
from mpidist.comm.memory.device_request import start_request
from mpidist.comm.memory.stream import Device
from mpidist.comm.messages import device_p2p
from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.serialization.tensor_format import Part
from mpidist.comm.transport.eager_message import DEVICE_SHIFT
from mpidist.comm.transport.incoming import Incoming, Request
from mpidist.errors import FrameError

# Announced by one message. Each GiB takes one receive, even if it never arrives.
_MAX_ANNOUNCED_BYTES = 1 << 44


class PayloadReceives:
    """Receives of payloads on one communicator.

    Args:
        mpi: The communicator.
        tag: Of payloads.
        memory: Provides the memory that payloads are received into.

    Attributes:
        is_probing: Payloads of later messages are matched before they are received.
    """

    def __init__(self, mpi: MPI.Comm, tag: int, memory: BufferPool) -> None:
        self._mpi = mpi
        self._tag = tag
        self._memory = memory
        self._byte = MPI.BYTE
        self._status = MPI.Status()
        self.is_probing = False
        self._sources: defaultdict[int, _UnmatchedPieces] = defaultdict(_UnmatchedPieces)
        # Key: rank. Value: the reason why its payloads cannot be assigned to messages.
        self._refused: dict[int, str] = {}

    def refuse(self, source: int, reason: str) -> None:
        """Receive no more payloads of a rank, because they cannot be assigned to messages."""
        self._refused.setdefault(source, reason)

    def begin(self, incoming: Incoming, count: int, start: int) -> None:
        """Start the receives of a message's payloads; if that fails, set the message's ``damage``.

        Args:
            count: Number of payloads.
            start: Offset in ``incoming.data`` of their sizes.
        """
        source = incoming.source
        found = struct.unpack_from(f"<{count}Q", incoming.data, start)
        announced = [(word & ((1 << DEVICE_SHIFT) - 1), word >> DEVICE_SHIFT) for word in found]
        if (total := sum([nbytes for nbytes, _ in announced])) > _MAX_ANNOUNCED_BYTES:
            self.refuse(source, f"it has announced {total} bytes in one message")
        if source in self._refused:
            incoming.damage = FrameError(
                f"payloads of rank {source} are received no more: {self._refused[source]}"
            )
            return
        incoming.parts, incoming.receives, incoming.arrive = parts, opened, arrive = [], [], []
        for nbytes, number in announced:
            device = None
            part: Part
            memory: Part
            try:
                if number:
                    part, (memory, device, bring) = device_p2p.space(
                        nbytes, torch.device("cuda", number - 1)
                    )
                    arrive.append(bring)
                else:
                    part = memory = self._memory.acquire(nbytes)
            except Exception as error:
                where = f"on device {number - 1}" if number else "in host memory"
                incoming.damage = FrameError(
                    f"{nbytes} bytes of rank {source} cannot be received {where}: {error}"
                )
                pieces: list[tuple[buffer.Buffer, int]] = [
                    ((None, 0, self._byte), length) for _, length in buffer.pieces(nbytes)
                ]
            else:
                parts.append(part)
                pieces = [(piece, piece[1]) for piece in pieces_of(memory)]
            for piece, length in pieces:
                if self.is_probing:
                    request: Request = _ProbedPiece(
                        self._mpi, self._sources[source], source, self._tag, piece, length, device
                    )
                else:
                    request = start_request(device, self._mpi.Irecv, piece, source, self._tag)
                opened.append((request, length))

    def have_arrived(self, incoming: Incoming) -> bool:
        """Return whether all payloads of a message have arrived; a wrong size sets its ``damage``.

        Raises:
            Exception: MPI reports a failed rank.
        """
        status, waiting = self._status, []
        for receive in incoming.receives:
            request, announced = receive
            try:
                if not request.Test(status):
                    waiting.append(receive)
                    continue
                arrived = status.Get_count(self._byte)
                reason = f"{arrived} bytes have arrived" if arrived != announced else ""
            except Exception as error:
                if not mpi_errors.is_mpi_error(error) or mpi_errors.is_failure(error):
                    raise
                reason = str(error)
            if reason and incoming.damage is None:
                incoming.damage = FrameError(
                    f"a payload of rank {incoming.source}, announced as {announced} bytes: {reason}"
                )
        incoming.receives = waiting
        if incoming.damage is not None and not waiting:
            incoming.parts, incoming.arrive, incoming.section = (), (), None
        return not waiting


class _UnmatchedPieces:
    """Announced pieces of one rank that are not matched yet, and the error that ended it."""

    __slots__ = ("announced", "error")

    def __init__(self) -> None:
        self.announced: deque[_ProbedPiece] = deque()
        self.error: Exception | None = None


class _ProbedPiece:
    """Receive of an announced piece, started when its message is matched; a request."""

    __slots__ = (
        "_device",
        "_message_bytes",
        "_mpi",
        "_nbytes",
        "_rank",
        "_request",
        "_source",
        "_space",
        "_tag",
    )

    def __init__(
        self,
        mpi: MPI.Comm,
        source: _UnmatchedPieces,
        rank: int,
        tag: int,
        space: buffer.Buffer,
        nbytes: int,
        device: Device | None,
    ) -> None:
        self._mpi, self._source, self._rank, self._tag = mpi, source, rank, tag
        self._space, self._nbytes, self._device = space, nbytes, device
        self._request: Request | None = None
        self._message_bytes = 0
        source.announced.append(self)

    def Test(self, status: MPI.Status) -> bool:
        """See MPI_Test; ``status`` gets the length of the message, received or not."""
        request = self._request if self._request is not None else self._match(status)
        if request is None:
            return False
        try:
            if not request.Test(status):
                return False
        except Exception as error:
            if (
                self._message_bytes <= self._nbytes
                or not mpi_errors.is_mpi_error(error)
                or mpi_errors.is_failure(error)
            ):
                raise
        if self._message_bytes > self._nbytes:
            status.Set_elements(MPI.BYTE, self._message_bytes)
        return True

    def _match(self, status: MPI.Status) -> Request | None:
        source = self._source
        if source.error is not None:
            raise source.error
        if source.announced[0] is not self:
            return None
        try:
            message = self._mpi.Improbe(self._rank, self._tag, status)
        except Exception as error:
            source.error = error
            source.announced.clear()
            raise
        if message is None:
            return None
        source.announced.popleft()
        self._message_bytes = status.Get_count(MPI.BYTE)
        if self._message_bytes > self._nbytes:
            self._space, self._device = (None, 0, MPI.BYTE), None
        self._request = start_request(self._device, message.Irecv, self._space)
        return self._request


def pieces_of(part: Part) -> list[buffer.Buffer]:
    """Return a part's memory in pieces that MPI can count: (buffer, bytes, MPI's datatype)."""
    if isinstance(part, torch.Tensor):
        return [
            buffer.byte_range(part, start, length) for start, length in buffer.pieces(part.nbytes)
        ]
    view = memoryview(part).cast("B")
    return [
        (view[start : start + length], length, MPI.BYTE)
        for start, length in buffer.pieces(view.nbytes)
    ]
