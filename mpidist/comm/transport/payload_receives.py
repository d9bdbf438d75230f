"""Receives of the payloads that eager messages announce.

The announced size is checked before memory is allocated, and the size that arrives against the
announced one, because memory is reused and would otherwise hold bytes of another message. Memory
that is announced but not written costs address space only.

Payloads have no numbers: they are received in the order of the messages that announce them. A
payload for which memory is missing is received with length zero, so that later ones keep their
order. If a message does not say which payloads belong to it, the order is lost, and all later
messages of that rank with payloads are refused. A message whose payloads several eager messages
announce is kept until the last has come; the receives are started with each.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import BufferPool
from mpidist.comm.memory.device_request import start_request
from mpidist.comm.messages import device_p2p
from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.serialization.tensor_format import Part
from mpidist.comm.transport.eager_message import DEVICE_SHIFT
from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import FrameError

# Announced by one message. Each GiB takes one receive, even if it never arrives.
_MAX_ANNOUNCED_BYTES = 1 << 44


class PayloadReceives:
    """Receives of payloads on one communicator.

    Args:
        mpi: The communicator.
        tag: Of payloads.
        memory: Provides the memory that payloads are received into.
    """

    def __init__(self, mpi: MPI.Comm, tag: int, memory: BufferPool) -> None:
        self._mpi = mpi
        self._tag = tag
        self._memory = memory
        self._byte = MPI.BYTE
        self._status = MPI.Status()
        # Key: rank. Value: its message that the next eager message continues, and the bytes
        # announced so far.
        self._continued: dict[int, tuple[Incoming, int]] = {}
        # Key: rank. Value: the reason why its payloads cannot be assigned to messages.
        self._refused: dict[int, str] = {}

    def refuse(self, source: int, reason: str) -> None:
        """Receive no more payloads of a rank, because they cannot be assigned to messages."""
        self._refused.setdefault(source, reason)

    def begin(self, incoming: Incoming, count: int, start: int) -> None:
        """Start the receives of a message's payloads; if that fails, set the message's ``damage``.

        Those of a message that it continues become its own.

        Args:
            count: Number of payloads.
            start: Offset in ``incoming.data`` of their sizes.
        """
        source = incoming.source
        found = struct.unpack_from(f"<{count}Q", incoming.data, start)
        announced = [(word & ((1 << DEVICE_SHIFT) - 1), word >> DEVICE_SHIFT) for word in found]
        total = sum([nbytes for nbytes, _ in announced])
        # The same lists, because copies would take quadratic time.
        lists: Any = [], [], []
        if source in self._continued:
            earlier, so_far = self._continued.pop(source)
            lists = earlier.parts, earlier.receives, earlier.arrive
            incoming.damage = earlier.damage
            total += so_far
        incoming.parts, incoming.receives, incoming.arrive = parts, opened, arrive = lists
        if incoming.is_continued:
            self._continued[source] = incoming, total
        if total > _MAX_ANNOUNCED_BYTES:
            self.refuse(source, f"it has announced {total} bytes in one message")
        if source in self._refused:
            incoming.damage = FrameError(
                f"payloads of rank {source} are received no more: {self._refused[source]}"
            )
            return
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
