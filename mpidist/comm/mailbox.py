"""Messages between ranks that nobody has announced: a short letter, and memory of any size that follows it.

A letter arrives in one message, of at most ``LETTER_BYTES``, in memory that a receive is posted for all the time. Whatever is
larger follows as messages of its own, straight from and into place. Per pair of ranks letters arrive in the order in which they
were sent (MPI-4.1 §3.5); what follows a letter may arrive after later letters, so it is handed out twice: when the letter is
there, and when all of it is.

No call here blocks, and one thread at a time may ``poll``; any number may ``send``. So all ranks may send to all at once,
whatever the size: whoever polls receives.

::

    parts n u32 | letter's bytes u32 | n descriptions u64 (bytes, device index + 1 in the top byte; 0: host memory) | padding
    letter                                                                                       (from a multiple of 16 bytes)
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm import buffer, device_messages, faults, runtime
from mpidist.comm.group import ProcessGroup
from mpidist.comm.library import MPI
from mpidist.comm.receive_memory import ReceiveMemory
from mpidist.comm.stream import device_at, start_request, used_here
from mpidist.errors import FrameError

LETTER_BYTES = 32 << 10  # what fits a letter's message, its envelope included
_LETTER_TAG, _PART_TAG = 7, 8
_FIXED = struct.Struct("<II")
_DEVICE_SHIFT = 56
_ALIGNMENT = 16
_MAX_PARTS = 1 << 20  # more than any real object has; an envelope that says more is not ours
_RECEIVES = 4  # posted at a time

Part = Any  # torch.Tensor (uint8, contiguous) or an object with the buffer protocol


def envelope_bytes(parts: int) -> int:
    """Return how far into its message a letter with so many parts begins; a multiple of 16."""
    return -(-(_FIXED.size + 8 * parts) // _ALIGNMENT) * _ALIGNMENT


class Arrival:
    """A letter that has arrived, and its parts.

    Attributes:
        source: The sender's rank.
        letter: The letter's memory, its own; writable.
        parts: Memory of the parts, or device tensors; to be read once ``is_complete``.
        note: What the reader noted when the letter came; None before.
    """

    __slots__ = ("_bring", "_open", "letter", "note", "parts", "source")

    def __init__(self, source: int, letter: memoryview) -> None:
        self.source = source
        self.letter = letter
        self.parts: list[Part] = []
        self.note: Any = None
        self._open: list[Any] = []
        self._bring: list[Callable[[], list[Any]]] = []

    @property
    def is_complete(self) -> bool:
        """Say whether all parts are there."""
        return not self._open

    def bring(self) -> None:
        """Bring parts of a device to their place; the calling thread's current stream comes behind them."""
        for arrive in self._bring:
            for event in arrive():
                event.hold()
        self._bring.clear()
        for part in self.parts:
            if isinstance(part, torch.Tensor):
                used_here(part)


class Mailbox:
    """The letters of a group's ranks, or of a lonely process (``group`` None), which writes to itself alone.

    Args:
        group: Whose communicator is used, with tags of its own.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = group.rank if group is not None else 0
        self.size = group.size if group is not None else 1
        self._memory = ReceiveMemory()
        self._own: deque[Arrival] = deque()  # written to itself
        self._sending: deque[tuple[Any, Any]] = deque()
        self._arriving: list[Arrival] = []
        self._part_order = threading.Lock()
        self._posted: deque[tuple[Any, memoryview]] = deque()
        self._read: Any = None  # the receive whose letter was read last, to be posted again
        self._status: Any = None
        if group is not None:
            self._mpi = group._comm.plain
            self._letter_tag, self._part_tag = group._comm.own_tag(_LETTER_TAG), group._comm.own_tag(_PART_TAG)
            self._status = MPI.Status()
            for _ in range(_RECEIVES):
                space = bytearray(LETTER_BYTES)
                request = self._mpi.Recv_init((space, LETTER_BYTES, MPI.BYTE), MPI.ANY_SOURCE, self._letter_tag)
                request.Start()
                self._posted.append((request, memoryview(space)))
            runtime.close_at_exit(self, stage=1)  # after those who poll

    def send(self, to: int, letter: bytes | bytearray, parts: Sequence[Part] = (), devices: Sequence[int | None] = ()) -> None:
        """Send a letter and what belongs to it; ``parts`` must stay unchanged until the receiver has answered.

        Args:
            to: The receiver's rank; may be the caller's own.
            letter: Has room for the envelope at its beginning: ``envelope_bytes(len(parts))`` bytes, which this fills.
            parts: Memory of any size.
            devices: For each part, the index of the receiver's device for it; None for host memory.

        Blocks: no; for parts on a device, until the work that produces them has ended.
        """
        if len(letter) > LETTER_BYTES:
            # The receiver could only refuse it, and Open MPI would write past its memory before it says so.
            raise ValueError(f"a letter of {len(letter)} bytes; at most {LETTER_BYTES} travel in one")
        if not parts:
            _FIXED.pack_into(letter, 0, 0, len(letter) - _ALIGNMENT)
            if to == self.rank:
                self._own.append(Arrival(to, memoryview(letter)))
            else:
                self._sending.append((self._mpi.Isend((letter, len(letter), MPI.BYTE), to, self._letter_tag), letter))
            return
        _write_envelope(letter, parts, devices)
        if to == self.rank:
            self._send_to_self(letter, parts, devices)
            return
        # The receiver posts its receives in the order of letters: no other message's parts may come between.
        ready = [device_messages.to_send(part) if isinstance(part, torch.Tensor) else (part, None) for part in parts]
        with self._part_order:
            self._sending.append((self._mpi.Isend((letter, len(letter), MPI.BYTE), to, self._letter_tag), letter))
            for memory, device in ready:
                for piece in _pieces(memory):
                    self._sending.append((start_request(device, self._mpi.Isend, piece, to, self._part_tag), memory))

    def poll(self) -> Arrival | None:
        """Look once for a letter, or for the rest of one that was handed out incomplete; None if nothing has come.

        Raises:
            FrameError: A message that is no letter of ours. It is dropped, and the next call goes on.
        """
        if self._own:
            return self._own.popleft()
        if not self._posted:
            return None
        # Only now, and not as soon as the last letter was read: every call of MPI gives Python's lock away, and while the main
        # thread computes it takes half a millisecond to come back. The other posted receives bridge the gap.
        if self._read is not None:
            self._read.Start()
            self._read = None
        request, space = self._posted[0]
        try:
            is_there = request.Test(self._status)
        except Exception as error:
            if not faults.is_mpi_error(error):
                raise
            request.Start()
            self._posted.rotate(-1)
            raise FrameError(f"a message of rank {self._status.source} was refused: {error}") from error
        if is_there:
            # In the order in which they were posted: that is the order of each sender's letters.
            self._posted.rotate(-1)
            source, count = self._status.source, self._status.Get_count(MPI.BYTE)
            letter = bytearray(space[:count])
            self._read = request
            return self._received(source, memoryview(letter))
        return self._look_after() if self._sending or self._arriving else None

    def _look_after(self) -> Arrival | None:
        sending = self._sending
        while sending and sending[0][0].Test():
            sending.popleft()
        for place, arrival in enumerate(self._arriving):
            arrival._open = [request for request in arrival._open if not request.Test()]
            if not arrival._open:
                del self._arriving[place]
                return arrival
        return None

    def close(self, timeout_s: float) -> None:
        """Withdraw the receives, so that MPI can end."""
        posted, self._posted = self._posted, deque()
        for request, _ in posted:
            if request is not self._read:
                request.Cancel()
                request.Wait()
            request.Free()

    def _received(self, source: int, message: memoryview) -> Arrival:
        nbytes = len(message)
        if nbytes >= _ALIGNMENT and _FIXED.unpack_from(message) == (0, nbytes - _ALIGNMENT):
            return Arrival(source, message)
        if nbytes < _FIXED.size:
            raise FrameError(f"truncated message of {len(message)} bytes from rank {source}")
        count, letter_bytes = _FIXED.unpack_from(message)
        start = envelope_bytes(count)
        if count > _MAX_PARTS or len(message) != start + letter_bytes:
            raise FrameError(
                f"message of {len(message)} bytes from rank {source} announces {count} parts and a letter of {letter_bytes} bytes"
            )
        arrival = Arrival(source, message)
        for (description,) in struct.iter_unpack("<Q", message[_FIXED.size : _FIXED.size + 8 * count]):
            self._receive(arrival, description & ((1 << _DEVICE_SHIFT) - 1), description >> _DEVICE_SHIFT)
        if arrival._open:
            self._arriving.append(arrival)
        return arrival

    def _receive(self, arrival: Arrival, nbytes: int, number: int) -> None:
        part: Part
        memory: Part
        device = None
        if number:
            part, (memory, device, arrive) = device_messages.space(nbytes, torch.device("cuda", number - 1))
            arrival._bring.append(arrive)
        else:
            part = memory = self._memory.lend(nbytes)
        arrival.parts.append(part)
        for piece in _pieces(memory):
            arrival._open.append(start_request(device, self._mpi.Irecv, piece, arrival.source, self._part_tag))

    def _send_to_self(self, letter: bytes | bytearray, parts: Sequence[Part], devices: Sequence[int | None]) -> None:
        # A copy: caller and callee must not share what they would not share on two ranks.
        arrival = Arrival(self.rank, memoryview(letter))
        for place, part in enumerate(parts):
            device = devices[place] if devices else None
            if device is not None:
                copy = part.to(torch.device("cuda", device), copy=True)
                if (where := device_at(copy.device)) is not None:
                    arrival._bring.append(partial(list, (where.here(),)))  # another thread reads it, on a stream of its own
                arrival.parts.append(copy)
                continue
            plain: Any = part.numpy() if isinstance(part, torch.Tensor) else part
            source = memoryview(plain).cast("B")
            space = self._memory.lend(source.nbytes)
            space[:] = source
            arrival.parts.append(space)
        self._own.append(arrival)


def _write_envelope(letter: Any, parts: Sequence[Part], devices: Sequence[int | None]) -> None:
    descriptions = []
    for place, part in enumerate(parts):
        device = devices[place] if devices else None
        nbytes = part.nbytes if isinstance(part, torch.Tensor) else memoryview(part).nbytes
        descriptions.append(nbytes | (0 if device is None else device + 1) << _DEVICE_SHIFT)
    _FIXED.pack_into(letter, 0, len(parts), len(letter) - envelope_bytes(len(parts)))
    struct.pack_into(f"<{len(parts)}Q", letter, _FIXED.size, *descriptions)


def _pieces(part: Part) -> list[tuple[Any, int, Any]]:
    if isinstance(part, torch.Tensor):
        return [buffer.byte_range(part, start, length) for start, length in buffer.pieces(part.nbytes)]
    view = memoryview(part).cast("B")
    return [(view[start : start + length], length, MPI.BYTE) for start, length in buffer.pieces(view.nbytes)]
