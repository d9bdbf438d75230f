"""Ring of the last operations of this process, in a mapped file or in its own memory.

``begin`` stores an entry in the slot of its number, ``end`` the time in that slot; neither takes a
lock or calls the system. Numbers and slots come from an ``enumerate`` of a part of the ring, whose
step no other thread divides. When a part is used up, the thread that finds it so opens the next
one: the entries that are still under way in it move to kept slots, so a rank that hangs still tells
in what. So no entry looks at what its slot has held.

The memory is a shared mapping of a file: the kernel keeps what was stored whatever becomes of the
process, and another process reads it at any time. See ``file_format``. A forked child has memory of
its own at the same address from its first instruction of Python on: what it records nobody reads.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from mpidist import shared_place
from mpidist.comm.mpi.process_start import start_ticks
from mpidist.comm.recorder import file_format
from mpidist.comm.recorder.file_format import (
    END_WORD,
    HEADER_BYTES,
    NUMBER_WORD,
    PEER_HALF_WORD,
    SLOT_BYTES,
    SLOT_WORDS,
)
from mpidist.file_errors import naming
from mpidist.weak_registry import WeakRegistry

SLOTS = 4096
_KEPT = 64
# Slots of a part, at most; and parts of a ring, at least, where it has as many slots.
_PART_SLOTS, _PARTS = 256, 16
# Entries that are remembered to have no slot, so that their ends are not stored in another's.
_FORGOTTEN = 1 << 16
_TABLE_BYTES = 256 * 1024
# Of the table: what comes later is listed without its shape, as the shapes of a program may be many
# and its operations are few.
_OF_SHAPES = 3 / 4
_RESERVED_PART = 64  # of the table one part in so many, for worlds and the process's end
_LONGEST = 200  # of a name in a signature
_LONGEST_TEXT, _MOST_FRAMES = 1000, 64  # of what has ended the process
_WORD = 8
_MAP_FIXED = 0x10  # of <sys/mman.h>, which Python's mmap lacks

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_mmap.restype = ctypes.c_void_p


# begin(signature, sequence=0, size_bytes=0, peer=-1, tag=0) -> number, the same where all but the
# sequence is known before, which begins(signature, size_bytes, peer=-1, tag=0) returns, and
# end(number)
Begin: TypeAlias = Callable[..., int]
BeginNext: TypeAlias = Callable[[int], int]
Begins: TypeAlias = Callable[..., BeginNext]
End: TypeAlias = Callable[[int], None]


class Ring:
    """Ring of entries, and the table of their signatures.

    Args:
        path: Of the file, which is replaced; None for memory of this process alone.
        job: Name of the job.
        rank: World rank.
        size: Number of ranks in the world.
        slots: Number of entries that are kept.
        world: Key of the world.

    Raises:
        OSError: The file cannot be made, or its memory not be had.

    Attributes:
        path: Of the file; None in a forked child.
        begin: Stores the begin of an operation in this thread, and returns its number. Takes its
            signature; the number of the collective on its group (0); the bytes of its data (0);
            the world rank of the other side (-1 for none, or any); a message's tag or a call's
            number (0).
        begins: Returns a function that does the same for known arguments: it takes the number of
            the collective alone.
        end: Stores the end of the operation of a number; called once, by any thread.
        fail: Called in its place: the operation has ended by an exception.
    """

    def __init__(
        self, path: Path | None, job: str = "", rank: int = 0, size: int = 1, slots: int = SLOTS,
        world: str = "",
    ) -> None:  # fmt: skip
        self.path = path
        self._slots = slots
        self._table_offset = file_format.file_bytes(slots, _KEPT, 0)
        self._table_bytes = _TABLE_BYTES
        self._buffer = _mapped(path, self._table_offset + self._table_bytes)
        self._words = memoryview(self._buffer).cast("q")
        first = HEADER_BYTES // _WORD
        slot_words = self._words[first : first + (slots + _KEPT) * SLOT_WORDS]
        self._ends = slot_words[END_WORD::SLOT_WORDS]
        self._numbers = slot_words[NUMBER_WORD::SLOT_WORDS]
        self._peers = slot_words.cast("B").cast("i")[PEER_HALF_WORD :: 2 * SLOT_WORDS]
        length = max(1, min(_PART_SLOTS, slots // _PARTS))
        self._parts = [
            _Part(self._ends, range(start, min(start + length, slots)))
            for start in range(0, slots, length)
        ]
        self._published = 0
        self._is_full = False
        self._signatures: dict[tuple[str, str, str, str, tuple[int, ...]], int] = {}
        self._groups: dict[tuple[str, str, tuple[int, ...]], str] = {}  # label
        self._named: Counter[str] = Counter()  # groups by name
        # Kept slot by the number of an entry under way, whose own slot may be another's; None where
        # none was free.
        self._kept: dict[int, int | None] = {}
        # Of the table, of the kept slots, and of the next part. A signal's handler or a finalizer
        # may record within it.
        self._lock = threading.RLock()
        self.begin: Begin
        self.begins: Begins
        self.end: End
        self.fail: End
        self.begin, self.begins, self.end, self.fail = self._writers()
        self._write_header(job, rank, size)
        for kind in file_format.KINDS:
            self.signature(kind, file_format.UNLISTED)
        self._append(["world", world, 1], is_reserved=True)
        _rings.add(self)

    def signature(
        self,
        kind: str,
        operation: str,
        group: str = "",
        dtype: str = "",
        shape: Sequence[int] = (),
    ) -> int:
        """Return the number of a signature, which is written to the table the first time.

        Args:
            kind: One of ``recording.Kind``.
            operation: Its name.
            group: A result of ``group``; empty without one.
            dtype: Of its tensor without ``torch.``; empty without one.
            shape: Of its tensor.
        """
        key = (kind, operation, group, dtype, tuple(shape))
        number = self._signatures.get(key)
        return self._listed(key) if number is None else number

    def group(self, name: str, key: str, world_ranks: Sequence[int]) -> str:
        """Return the label of a group, which is written to the table the first time."""
        identity = (name, key, tuple(world_ranks))
        with self._lock:
            label = self._groups.get(identity)
            if label is not None:
                return label
            same = self._named[name]
            label = _short(f"{name}#{same + 1}" if same else name)
            # Without room in the table nothing is kept, so that groups made later take no memory.
            if self._append(["group", label, key, _as_json(identity[2])]):
                self._groups[identity] = label
                self._named[name] += 1
            return label

    @property
    def slots(self) -> int:
        """Return the number of entries that the ring holds."""
        return self._slots

    def copied_slots(self) -> bytes:
        """Return a copy of all slots, the kept ones last, that no thread writes meanwhile."""
        return self._buffer[file_format.HEADER_BYTES : self._table_offset]

    def copied_table(self) -> bytes:
        """Return a copy of the table; it has the signatures of all slots copied before."""
        return self._buffer[self._table_offset : self._table_offset + self._published]

    def move(self, world: str, rank: int, size: int) -> None:
        """Store that this process has entered another world, and its rank there."""
        with self._lock:
            self._groups.clear()
            self._named.clear()
            self._append(["world", world, max(self._numbers) + 1], is_reserved=True)
            fields = list(file_format.HEADER.unpack_from(self._buffer))
            fields[9:11] = rank, size
            file_format.HEADER.pack_into(self._buffer, 0, *fields)

    def ended(self, text: str, error: BaseException | None = None) -> None:
        """Write what ends this process to the table.

        Args:
            text: The reason.
            error: The exception, if it is one.
        """
        trace = None if error is None else error.__traceback__
        frames = [
            [frame.f_code.co_filename, line, frame.f_code.co_name]
            for frame, line in traceback.walk_tb(trace)
        ]
        name = "" if error is None else type(error).__name__
        with self._lock:
            end = ["end", name, text[:_LONGEST_TEXT], frames[: -_MOST_FRAMES - 1 : -1]]
            self._append(end, is_reserved=True)

    def name_peer(self, number: int, peer: int) -> None:
        """Store the world rank of an entry's other side, which its begin did not know.

        Called before its end.
        """
        with self._lock:
            kept, slot = self._kept.get(number), number % self._slots
            if kept is not None:
                self._peers[kept] = peer
            if self._numbers[slot] == number:
                self._peers[slot] = peer

    def acquire(self) -> None:
        """Keep other threads out of all but entries in a part that is open."""
        self._lock.acquire()

    def release(self) -> None:
        """Let them in again."""
        self._lock.release()

    def leave_to_parent(self) -> None:
        """Go on in empty memory of this process alone; called in a forked child.

        The functions that others have taken of this ring store at the same addresses.
        """
        self.path = None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _mmap(address, len(self._buffer), protection, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "no memory for the recorder of a forked child")

    def close(self) -> None:
        """Unmap the memory; nothing may be recorded any more."""
        _rings.discard(self)
        self._parts.clear()
        for view in (self._ends, self._numbers, self._peers, self._words):
            view.release()
        self._buffer.close()

    def _writers(self) -> tuple[Begin, Begins, End, End]:
        """Return ``begin``, ``begins``, ``end`` and ``fail``.

        What they need is in their cells: fifteen attributes of an object cost a fifth of an entry.
        """
        buffer, ends, slots, kept = self._buffer, self._ends, self._slots, self._kept
        open_part, end_kept = self._open_part, self._end_kept
        pack, pack_next = file_format.BEGUN.pack_into, file_format.BEGUN_NEXT.pack_into
        clock, native_id = time.monotonic_ns, threading.get_native_id
        here = threading.local()
        # Number and offset of the next entries, and the number of the first one behind them.
        following: Iterator[tuple[int, int]] = iter(())
        first, lock = 1, self._lock

        def take_from_next_part() -> tuple[int, int]:
            nonlocal following, first
            while True:
                with lock:
                    # Another thread may have opened it meanwhile.
                    number_and_offset = next(following, None)
                    if number_and_offset is not None:
                        return number_and_offset
                    begun = first
                    offsets = open_part(begun)
                    opened, behind = enumerate(offsets, begun), begun + len(offsets)
                    # As what this thread has executed in between. No call stands between this look
                    # and the stores.
                    if first == begun:
                        following, first = opened, behind

        def begin(
            signature: int, sequence: int = 0, size_bytes: int = 0, peer: int = -1, tag: int = 0
        ) -> int:
            try:
                number, offset = next(following)
            except StopIteration:
                number, offset = take_from_next_part()
            try:
                thread = here.native_id
            except AttributeError:
                thread = here.native_id = native_id()
            pack(
                buffer, offset, clock(), sequence, size_bytes, tag, peer, signature, thread, number
            )
            return number

        def begins(signature: int, size_bytes: int, peer: int = -1, tag: int = 0) -> BeginNext:
            constant = file_format.CONSTANT.pack(size_bytes, tag, peer, signature)

            # The lines of ``begin`` again: a call of a function for them costs a tenth of an entry.
            def begin_next(sequence: int) -> int:
                try:
                    number, offset = next(following)
                except StopIteration:
                    number, offset = take_from_next_part()
                try:
                    thread = here.native_id
                except AttributeError:
                    thread = here.native_id = native_id()
                pack_next(buffer, offset, clock(), sequence, constant, thread, number)
                return number

            return begin_next

        # No call stands between the look at what is kept and the store: no thread runs in between.
        def end(number: int) -> None:
            now = clock()
            if number in kept:
                end_kept(number, now)
            else:
                ends[number % slots] = now

        def fail(number: int) -> None:
            now = -clock()
            if number in kept:
                end_kept(number, now)
            else:
                ends[number % slots] = now

        return begin, begins, end, fail

    def _open_part(self, first: int) -> Sequence[int]:
        """Return the offsets of the slots of the numbers from ``first`` on, to the part's end.

        The entries under way in them move to kept slots; of more such entries the ring forgets
        some. Called with the lock held.
        """
        slot = first % self._slots
        part = self._parts[slot // len(self._parts[0].slots)]
        if first >= self._slots and part.has_under_way():
            for one in part.slots:
                if not self._ends[one]:
                    self._keep(one)
        return part.offsets[slot - part.slots.start :]

    def _keep(self, slot: int) -> None:
        ends, numbers, buffer = self._ends, self._numbers, self._buffer
        number, free = numbers[slot], range(self._slots, self._slots + _KEPT)
        if not number or number in self._kept or len(self._kept) > _FORGOTTEN:
            return
        kept = next((one for one in free if ends[one] or not numbers[one]), None)
        # Listed before it is copied: an end that comes in between is stored in the copy, or in what
        # is copied.
        self._kept[number] = kept
        if kept is not None:
            offset, other = _offset(slot), _offset(kept)
            buffer[other : other + SLOT_BYTES] = buffer[offset : offset + SLOT_BYTES]
        if ends[slot]:
            self._kept.pop(number, None)

    def _end_kept(self, number: int, now: int) -> None:
        with self._lock:
            kept, slot = self._kept.pop(number, None), number % self._slots
            if kept is not None:
                self._ends[kept] = now
            # Readers that have found it in its own slot look there again.
            if self._numbers[slot] == number:
                self._ends[slot] = now

    def _listed(self, key: tuple[str, str, str, str, tuple[int, ...]]) -> int:
        kind, operation, group, dtype, shape = key
        if shape and self._published > _OF_SHAPES * self._table_bytes:
            return self.signature(kind, operation, group, dtype)
        with self._lock:
            number = self._signatures.get(key)
            if number is None:
                number = len(self._signatures)
                if self._is_full or not self._append(
                    ["signature", kind, _short(operation), group, dtype, list(shape)]
                ):
                    self._is_full = True
                    return file_format.KINDS.index(kind)
                self._signatures[key] = number
            return number

    def _append(self, record: object, is_reserved: bool = False) -> bool:
        """Publish a record of the table; return whether there was room for it.

        Args:
            is_reserved: It may take the part that is reserved.
        """
        data = json.dumps(record).encode()
        begin, length = self._published, file_format.LENGTH.size + len(data)
        reserved = 0 if is_reserved else self._table_bytes // _RESERVED_PART
        if begin + length > self._table_bytes - reserved:
            return False
        at = self._table_offset + begin
        self._buffer[at : at + length] = file_format.LENGTH.pack(len(data)) + data
        self._published += length
        # One word, after what it publishes.
        self._words[file_format.PUBLISHED_OFFSET // _WORD] = self._published
        return True

    def _write_header(self, job: str, rank: int, size: int) -> None:
        file_format.HEADER.pack_into(
            self._buffer,
            0,
            file_format.MAGIC,
            file_format.VERSION,
            self._slots,
            _KEPT,
            self._table_bytes,
            0,
            time.time_ns(),
            time.monotonic_ns(),
            start_ticks(os.getpid()),
            rank,
            size,
            os.getpid(),
            job.encode()[:96],
            socket.gethostname().encode()[:64],
            " ".join(sys.argv).encode(errors="replace")[:1024],
        )


_rings: WeakRegistry[Ring] = WeakRegistry()
# Held while a thread forks. A signal's handler may fork within it.
_fork_lock = threading.RLock()
_forked: list[list[Ring]] = []  # for each fork under way the rings whose locks its thread holds


def _acquire_all() -> None:
    _fork_lock.acquire()
    # A lock that another thread held would be held for ever in the child, which lacks the thread.
    rings = _rings.alive()
    for ring in rings:
        ring.acquire()
    _forked.append(rings)


def _release_all() -> None:
    for ring in _forked.pop():
        ring.release()
    _fork_lock.release()


def _leave_all_to_parent() -> None:
    for ring in _forked[-1]:
        ring.leave_to_parent()
    _release_all()


os.register_at_fork(
    before=_acquire_all, after_in_parent=_release_all, after_in_child=_leave_all_to_parent
)


class _Part:
    """Slots of the ring that follow each other, which are opened together.

    Args:
        ends: Of all slots.
        slots: Its own.
    """

    def __init__(self, ends: memoryview[int], slots: range) -> None:
        self.slots = slots
        self.offsets = [_offset(slot) for slot in slots]
        self._ends = np.asarray(ends[slots.start : slots.stop])

    def has_under_way(self) -> bool:
        """Return whether a slot has no end."""
        return bool(np.count_nonzero(self._ends) < len(self.slots))


def _mapped(path: Path | None, length: int) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, length)
    file = shared_place.made(path, os.O_RDWR)
    try:
        with naming(path):
            # Reserved here, because a store to memory that cannot be had kills the process.
            os.posix_fallocate(file, 0, length)
            return mmap.mmap(file, length)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _offset(slot: int) -> int:
    return HEADER_BYTES + slot * SLOT_BYTES


def _as_json(ranks: tuple[int, ...]) -> object:
    """Return ranks as a list, or as a range where they are one: a table of a large job is short."""
    if len(ranks) > 1:
        step = ranks[1] - ranks[0]
        span = range(ranks[0], ranks[-1] + (step > 0) - (step < 0), step or 1)
        if tuple(span) == ranks:
            return {"range": [span.start, span.stop, span.step]}
    return list(ranks)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
