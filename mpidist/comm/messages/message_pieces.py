"""Long messages of staged device memory: a head in the message's place, then pieces of their own.

The sender copies a piece to pinned memory while the pieces before it are with MPI; the receiver
copies one to its device while the next ones arrive. A few pieces of a message are pinned at a time.

The head is matched by the user's tag, in the order of messages, and tells the length of the whole.
A receiver compares it before any piece arrives. Receivers of all kinds of memory take pieces: in
pinned memory, or in place. Pieces have one of the library's tags (``Tag.MESSAGE_PIECE``), which no
other message from the same sender has meanwhile: they are synchronous sends, so an ended message is
one whose pieces are all matched.

A transfer is advanced by the thread that waits for it, by threads that wait for other messages, and
by ``receive_poller``.
"""

from __future__ import annotations

import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mpidist.comm.algorithms import staging
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer import Buffer
from mpidist.comm.memory.device_request import as_current, start_request
from mpidist.comm.memory.stream import Device, Event
from mpidist.comm.messages import receive_poller
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request
from mpidist.comm.mpi.tags import PIECE_TAGS, Tag
from mpidist.errors import GroupError

# Pieces of one message between the copy to or from pinned memory and the end of their transfer.
_WINDOW = 3
_PAUSE_S = 5e-4  # of a blocking wait between two tests

# Identity, bytes of the message, bytes of a piece, number of the pieces' tag. The length is one
# that hardly any tensor has: a message of it is read before it is taken for the data.
_HEAD = struct.Struct("<16sQQQx")
_IDENTITY = bytes.fromhex("8f1d6a0b35c947e2a6d0f3715b2ce894")
HEAD_BYTES = _HEAD.size

# Memory of pieces whose transfer ended in an error: MPI may still work on it.
_lost: list[object] = []


@dataclass(frozen=True)
class Head:
    """First message of a transfer.

    Attributes:
        nbytes: Of the whole message.
        piece_bytes: Of each piece but the last.
        slot: Number of the pieces' tag.
    """

    nbytes: int
    piece_bytes: int
    slot: int

    def to_bytes(self) -> bytes:
        """Return the message."""
        return _HEAD.pack(_IDENTITY, self.nbytes, self.piece_bytes, self.slot)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Head | None:
        """Return the head; None for a message of the same length that is none."""
        identity, *fields = _HEAD.unpack(data)
        return cls(*fields) if identity == _IDENTITY else None


class Source(Protocol):
    """Device memory that is sent."""

    @property
    def device(self) -> Device:
        """Its device."""

    def load(self, start: int, nbytes: int) -> tuple[torch.Tensor, Event]:
        """Copy bytes to pinned memory; return it, and the event behind which it is filled."""


class Target(Protocol):
    """Device memory that is received into."""

    @property
    def device(self) -> Device:
        """Its device."""

    def space(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory for a piece."""

    def store(self, start: int, piece: torch.Tensor) -> None:
        """Queue the copy of a piece to the device."""


class Destination(Protocol):
    """Receive that a head may have matched.

    Attributes:
        nbytes: Length of its memory.
        received: Length of the message; set to that of the whole.
        space: Its memory, for pieces that are received in place.
        device: Device of that memory; None for the host.
        target: Where pieces go instead, and the offset there.
    """

    nbytes: int
    received: int
    space: Buffer
    device: Device | None
    target: tuple[Target, int] | None


class PieceTransfers:
    """Transfers under way of one group, by pieces.

    Args:
        comm: The group's communicator.
        mpi: The form of it that messages call.

    Attributes:
        is_watched: See ``receive_poller``, which sets it.
        is_in_use: False: pieces go on while their owner computes.
    """

    def __init__(self, comm: Communicator, mpi: Mpi) -> None:
        self.mpi = mpi
        self.is_watched = self.is_in_use = False
        self._first_tag = comm.own_tag(Tag.MESSAGE_PIECE)
        self._lock = threading.Lock()
        self._slots = list(range(PIECE_TAGS))
        self._active: dict[int, _Transfer] = {}

    def tag_of(self, slot: int) -> int:
        """Return the tag of the pieces of a message."""
        return self._first_tag + slot

    def send(
        self, source: Source, spans: Sequence[tuple[int, int]], dst: int, tag: int
    ) -> list[Request] | None:
        """Start the sends of a message, one for each of its (start, length).

        Returns:
            Their requests; None if too many messages are under way for their tags.
        """
        with self._lock:
            if len(self._slots) < len(spans):
                return None
            slots = [self._slots.pop() for _ in spans]
        return [
            self._begin(_Send(self, source, start, length, dst, tag, slot))
            for (start, length), slot in zip(spans, slots, strict=True)
        ]

    def receive(
        self, destination: Destination, message: MPI.Message | MatchedMessage, sender: int
    ) -> Request:
        """Receive a matched message of ``HEAD_BYTES``: a head with its pieces, or data."""
        return self._begin(_Receive(self, destination, message, sender))

    def _begin(self, transfer: _Transfer) -> Request:
        with self._lock:
            self._active[id(transfer)] = transfer
        transfer.advance()
        if not transfer.is_over:
            receive_poller.watch(self)
        return transfer

    def end(self, transfer: _Transfer, slot: int | None) -> None:
        """Forget a transfer; the tag of its pieces may be used again, if it is given."""
        with self._lock:
            self._active.pop(id(transfer), None)
            if slot is not None:
                self._slots.append(slot)

    def close(self) -> None:
        """Send all pieces that are left, and post no more receives.

        The communicator may be freed afterwards, when all members have closed the group.
        """
        for transfer in list(self._active.values()):
            transfer.close()

    def match(self) -> bool:
        """Advance all transfers; return whether any was."""
        # A list first: each is advanced, and not those up to the first that moves. And list() of
        # values, not tuple(), whose memory is allocated within the copy: up to Python 3.11 that may
        # start a garbage collection, and another thread change the table.
        return any([transfer.advance() for transfer in list(self._active.values())])

    def is_empty(self) -> bool:
        """Return whether no transfer is under way."""
        return not self._active


class _Transfer(ABC):
    """Request of one message; threads take turns to advance it.

    Attributes:
        is_over: It has ended, with or without an error.
    """

    def __init__(self, transfers: PieceTransfers) -> None:
        self.is_over = False
        self._transfers = transfers
        self._mpi = transfers.mpi
        self._error: Exception | None = None
        self._lock = threading.Lock()
        # MPI's requests in the order of the message, with their memory.
        self._under_way: deque[tuple[Request, Any]] = deque()

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test; ``status`` is not filled."""
        self.advance()
        if self._error is not None:
            raise self._error
        return self.is_over

    def Wait(self, status: MPI.Status | None = None) -> None:
        """See MPI_Wait."""
        while not self.Test():
            time.sleep(_PAUSE_S)

    def advance(self) -> bool:
        """Do what can be done without waiting for a peer; return whether anything was."""
        # Another thread may be at it.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.is_over:
                return False
            has_moved, has_ended = self._advance()
            if has_ended:
                self._end(self._slot())
            return has_moved
        except Exception as error:
            self._fail(error)
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Leave nothing to do but tests of requests."""
        with self._lock:
            if self.is_over:
                return
            try:
                self._close()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        _lost.append(tuple(self._under_way))
        # Pieces of this message may still arrive: its tag is lost.
        self._end(None)

    def _end(self, slot: int | None) -> None:
        self.is_over = True
        self._transfers.end(self, slot)

    @abstractmethod
    def _close(self) -> None:
        """Leave nothing to do but tests of requests; raise if that cannot be."""

    @abstractmethod
    def _advance(self) -> tuple[bool, bool]:
        """Return whether anything was done, and whether the message has ended."""

    def _slot(self) -> int | None:
        return None


class _Send(_Transfer):
    """Send of a span of device memory."""

    def __init__(
        self,
        transfers: PieceTransfers,
        source: Source,
        start: int,
        nbytes: int,
        dst: int,
        tag: int,
        slot: int,
    ) -> None:
        super().__init__(transfers)
        self._source = source
        self._to = dst, transfers.tag_of(slot)
        head = Head(nbytes, staging.CHUNK_BYTES, slot)
        self._pieces = deque(
            (start + at, length) for at, length in buffer.pieces(nbytes, head.piece_bytes)
        )
        self._number = slot
        data = head.to_bytes()
        self._under_way.append((self._mpi.Isend([data, MPI.BYTE], dst, tag), data))

    def _slot(self) -> int:
        return self._number

    def _advance(self) -> tuple[bool, bool]:
        has_moved = False
        while self._under_way and self._under_way[0][0].Test():
            self._under_way.popleft()
            has_moved = True
        loaded: list[tuple[torch.Tensor, Event]] = []
        with as_current(self._source.device):
            # All copies are queued before the first is waited for.
            while self._pieces and len(self._under_way) + len(loaded) < _WINDOW:
                loaded.append(self._source.load(*self._pieces.popleft()))
            for piece, event in loaded:
                event.synchronize()
                self._post(piece)
        return has_moved or bool(loaded), not self._pieces and not self._under_way

    def _close(self) -> None:
        with as_current(self._source.device):
            while self._pieces:
                piece, event = self._source.load(*self._pieces.popleft())
                event.synchronize()
                # All of them, so in memory that is not pinned.
                self._post(piece.clone())

    def _post(self, piece: torch.Tensor) -> None:
        request = self._mpi.Issend(buffer.as_bytes(piece), *self._to)
        self._under_way.append((request, piece))


class _Receive(_Transfer):
    """Receive of a head and its pieces, or of data of the head's length."""

    def __init__(
        self,
        transfers: PieceTransfers,
        destination: Destination,
        message: MPI.Message | MatchedMessage,
        sender: int,
    ) -> None:
        super().__init__(transfers)
        self._destination = destination
        self._sender = sender
        self._head: Head | None = None
        self._first = bytearray(HEAD_BYTES)
        self._next = 0  # byte of the message at which the following piece begins
        request = message.Irecv((self._first, HEAD_BYTES, MPI.BYTE))
        self._under_way.append((request, None))

    def _advance(self) -> tuple[bool, bool]:
        has_moved = False
        while self._under_way and self._under_way[0][0].Test():
            _, piece = self._under_way.popleft()
            has_moved = True
            if self._head is None:
                self._read_head()
            elif isinstance(piece, tuple):
                assert self._destination.target is not None
                self._destination.target[0].store(*piece)
        if self._head is not None:
            while self._next < self._head.nbytes and len(self._under_way) < self._most:
                self._post(min(self._head.piece_bytes, self._head.nbytes - self._next))
                has_moved = True
        return has_moved, not self._under_way

    def _close(self) -> None:
        raise GroupError("the group was closed while a message arrived")

    def _read_head(self) -> None:
        destination = self._destination
        self._head = Head.from_bytes(self._first)
        if self._head is None:
            # ``device_p2p`` keeps memory of this length on the host.
            if destination.nbytes == HEAD_BYTES:
                destination.space[0][:] = self._first
            self._head = Head(0, 1, 0)
            return
        destination.received = self._head.nbytes
        self._fits = destination.nbytes == self._head.nbytes
        is_in_place = self._fits and destination.target is None
        self._most = self._head.nbytes if is_in_place else _WINDOW

    def _post(self, nbytes: int) -> None:
        """Post the receive of the following piece; without room for the message, of its bytes."""
        assert self._head is not None
        destination, start = self._destination, self._next
        self._next += nbytes
        device: Device | None = None
        held: Any = None
        if not self._fits:
            held = bytearray(nbytes)
            space: Buffer = (held, nbytes, MPI.BYTE)
        elif destination.target is not None:
            target, offset = destination.target
            with as_current(target.device):
                piece = target.space(nbytes)
            held = offset + start, piece
            space = buffer.as_bytes(piece)
        else:
            device = destination.device
            address = destination.space[0].address + start
            space = (buffer.memory(address, nbytes), nbytes, MPI.BYTE)
        tag = self._transfers.tag_of(self._head.slot)
        request = start_request(device, self._mpi.Irecv, space, self._sender, tag)
        self._under_way.append((request, held))
