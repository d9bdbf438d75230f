"""Receives of the payloads that a message announces.

What is announced is checked before memory is lent for it, and what has arrived against what was announced: lent memory has served
before, and what has not arrived is another message's. Memory that is only announced costs address space alone.

Payloads carry no number: they are received in the order of the messages that announce them. One for which there is no memory is
received without room, so that those behind it keep their order. Where a message does not say which payloads are its own, the
order is lost, and all later messages of that rank with payloads are refused.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from mpidist.comm import buffer, device_messages, faults
from mpidist.comm.incoming import Incoming, Part
from mpidist.comm.library import MPI
from mpidist.comm.receive_memory import ReceiveMemory
from mpidist.comm.stream import start_request
from mpidist.errors import FrameError

DEVICE_SHIFT = 56  # of a payload's device in the number that announces it
_MOST_BYTES = 1 << 44  # announced by one message: each GiB is a receive, whether it arrives or not


class PayloadReceives:
    """The receives of one communicator.

    Args:
        mpi: The communicator.
        tag: Of payloads.
        memory: Lends what they are received into.
    """

    def __init__(self, mpi: Any, tag: int, memory: ReceiveMemory) -> None:
        self._mpi = mpi
        self._tag = tag
        self._memory = memory
        self._byte = MPI.BYTE
        self._status: Any = MPI.Status()
        self._lost: dict[int, str] = {}  # by rank: the reason why its payloads cannot be told apart any more

    def lose(self, source: int, reason: str) -> None:
        """Receive no more payloads of a rank: which message they belong to is not known any more."""
        self._lost.setdefault(source, reason)

    def begin(self, incoming: Incoming, count: int, start: int) -> None:
        """Start the receives of a message's payloads; where that fails, note its damage.

        Args:
            count: Their number.
            start: The place in ``incoming.data`` where they are announced.
        """
        source = incoming.source
        found = struct.unpack_from(f"<{count}Q", incoming.data, start)
        announced = [(word & ((1 << DEVICE_SHIFT) - 1), word >> DEVICE_SHIFT) for word in found]
        if (total := sum([nbytes for nbytes, _ in announced])) > _MOST_BYTES:
            self.lose(source, f"it has announced {total} bytes in one message")
        if source in self._lost:
            incoming.damage = FrameError(f"payloads of rank {source} are received no more: {self._lost[source]}")
            return
        incoming.parts, incoming.receives, incoming.arrive = parts, opened, arrive = [], [], []
        for nbytes, number in announced:
            device = None
            part: Part
            memory: Part
            try:
                if number:
                    part, (memory, device, bring) = device_messages.space(nbytes, torch.device("cuda", number - 1))
                    arrive.append(bring)
                else:
                    part = memory = self._memory.lend(nbytes)
            except Exception as error:
                where = f"on device {number - 1}" if number else "in host memory"
                incoming.damage = FrameError(f"{nbytes} bytes of rank {source} cannot be received {where}: {error}")
                pieces: Any = [([None, 0, self._byte], length) for _, length in buffer.pieces(nbytes)]
            else:
                parts.append(part)
                pieces = [(piece, piece[1]) for piece in pieces_of(memory)]
            for piece, length in pieces:
                opened.append((start_request(device, self._mpi.Irecv, piece, source, self._tag), length))

    def have_arrived(self, incoming: Incoming) -> bool:
        """Say whether all of a message's payloads have; where one is not as announced, note the damage.

        Raises:
            Exception: What MPI raises of a rank that has died.
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
                if not faults.is_mpi_error(error) or faults.is_failure(error):
                    raise
                reason = str(error)
            if reason and incoming.damage is None:
                incoming.damage = FrameError(f"a payload of rank {incoming.source}, announced as {announced} bytes: {reason}")
        incoming.receives = waiting
        if incoming.damage is not None and not waiting:
            incoming.parts, incoming.arrive, incoming.section = (), (), None
        return not waiting


def pieces_of(part: Part) -> list[tuple[Any, int, Any]]:
    """Return a part's memory in pieces that MPI can count: (buffer, bytes, MPI's type)."""
    if isinstance(part, torch.Tensor):
        return [buffer.byte_range(part, start, length) for start, length in buffer.pieces(part.nbytes)]
    view = memoryview(part).cast("B")
    return [(view[start : start + length], length, MPI.BYTE) for start, length in buffer.pieces(view.nbytes)]
