"""What a letter between workers says: its kind, whose answer it is, which references it touches, and where its content lies.

Pure: from a header and a content to a letter with its parts, and back.

::

    magic "RP" | version u8 | kind u8 | generation u32 | sequence u64 | outer kind u8 | flags u8 | outer ids u16 | ids u16 |
    forks u16 | table bytes u32 | pickle bytes u32 | parts n u32 | reserved u32                                 (the header)
    outer ids u64 … | ids u64 … | forks (reference u64, fork u64) … | n part lengths u64 (top bit: a part of its own)
    table | pickle | small parts, each from a multiple of 16 bytes                    (the body; if too large, the first part)

A request may be wrapped: ``outer`` says which kind of metadata (autograd's) it carries, and its ids; the inner request is
complete in itself.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpidist.comm import mailbox
from mpidist.errors import FrameError

_MAGIC, _VERSION = b"RP", 1
_HEADER = struct.Struct("<2sBBIQBBHHHIIII")
_PLAIN_START = 16  # where the header of a letter without parts stands
_FAR_BODY = 1  # flag: the body is the first part
_OWN_PART = 1 << 63
_ALIGNMENT = 16
MAX_FORKS = 64  # more references than these are announced in letters ahead


class Kind(enum.IntEnum):
    """The kinds of messages. Those of distributed autograd are named here and handled by whoever registers for them."""

    CALL_PYTHON = 1
    CALL_BUILTIN = 2
    CALL_SCRIPT = 3
    REMOTE_PYTHON = 4
    REMOTE_BUILTIN = 5
    REMOTE_SCRIPT = 6
    RREF_FETCH = 7
    RREF_FORK = 8
    RREF_USER_DELETE = 9
    FORWARD_AUTOGRAD = 16  # an outer kind: wraps a request or its answer
    BACKWARD_AUTOGRAD = 17
    CLEANUP_AUTOGRAD = 18
    RESULT = 32
    REMOTE_DONE = 33
    EXCEPTION = 34
    BACKWARD_AUTOGRAD_DONE = 35
    CLEANUP_AUTOGRAD_DONE = 36
    LEAVE = 48
    QUIET_REPORT = 49
    QUIET_VERDICT = 50


KINDS = frozenset(Kind)
RESPONSES = frozenset(kind for kind in Kind if 32 <= kind < 48)


@dataclass(slots=True)
class Content:
    """An encoded object: see ``codec``.

    Attributes:
        pickled: The pickle.
        table: The tensors and references that the pickle names by number.
        parts: Memory that the table and the pickle refer to: ``bytes`` lie in the body, what else a mailbox takes follows it.
        devices: The receiver's device index of each part; None for host memory.
    """

    pickled: Any = b""
    table: Any = b""
    parts: list[Any] = field(default_factory=list)
    devices: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class Header:
    """All of a message but its content.

    Attributes:
        kind: What it is.
        generation: How many times RPC has been initialised on these ranks; what was sent before is not for us.
        sequence: The sender's number of a request; an answer carries it back.
        ids: What the kind needs: a reference, a fork, a counter.
        forks: (reference, fork) pairs that the receiver, their owner, counts as soon as the letter arrives.
        outer: Kind and ids of metadata around the message; None if it is not wrapped.
        noted: What the receiver's handler kept when the letter came.
    """

    kind: int
    generation: int
    sequence: int = 0
    ids: tuple[int, ...] = ()
    forks: Sequence[tuple[int, int]] = ()
    outer: tuple[int, tuple[int, ...]] | None = None
    flags: int = 0
    noted: Any = None
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)  # table, pickle, number of parts, where their lengths stand in the letter


def written(header: Header, content: Content) -> tuple[bytearray, Sequence[Any], Sequence[int | None]]:
    """Write a message as a letter, the parts that follow it, and their devices.

    Args:
        header: At most ``MAX_FORKS`` forks.
        content: Its object, encoded.
    """
    if not (content.parts or header.outer or header.forks) and len(content.pickled) < _PLAIN_BYTES and not content.table:
        return _plainly_written(header, content.pickled), (), ()
    outer_kind, outer_ids = header.outer or (0, ())
    numbers = [*outer_ids, *header.ids]
    for pair in header.forks:
        numbers += pair
    parts: list[Any] = []
    devices: list[int | None] = []
    near = len(content.table) + len(content.pickled)
    for place, part in enumerate(content.parts):
        if type(part) is bytes:
            numbers.append(len(part))
            near += len(part) + _ALIGNMENT
        else:
            numbers.append(part.nbytes | _OWN_PART)
            parts.append(part)
            devices.append(content.devices[place] if content.devices else None)
    head = _HEADER.size + 8 * len(numbers)
    is_far = mailbox.envelope_bytes(len(parts)) + head + near > mailbox.LETTER_BYTES
    if is_far:
        body = _body(bytearray(), content)
        parts, devices = [body, *parts], [None, *devices]
    letter = bytearray(mailbox.envelope_bytes(len(parts)))
    letter += _HEADER.pack(
        _MAGIC, _VERSION, header.kind, header.generation, header.sequence, outer_kind, _FAR_BODY if is_far else 0,
        len(outer_ids), len(header.ids), len(header.forks), len(content.table), len(content.pickled), len(content.parts), 0,
    )  # fmt: skip
    if numbers:
        letter += struct.pack(f"<{len(numbers)}Q", *numbers)
    if not is_far:
        _body(letter, content)
    return letter, parts, devices


_PLAIN_BYTES = mailbox.LETTER_BYTES - 1024
_ROOM = bytes(_PLAIN_START)


def _plainly_written(header: Header, pickled: bytes) -> bytearray:
    """Write what most letters are: a pickle alone."""
    ids = header.ids
    letter = bytearray(_ROOM)
    letter += _HEADER.pack(
        _MAGIC, _VERSION, header.kind, header.generation, header.sequence, 0, 0, 0, len(ids), 0, 0, len(pickled), 0, 0
    )
    if ids:
        letter += struct.pack(f"<{len(ids)}Q", *ids)
    letter += pickled
    return letter


def header_of(letter: memoryview) -> Header:
    """Read a letter's header.

    Raises:
        FrameError: Not a letter between workers, or of a kind that is not known.
    """
    start = _start(letter)
    if len(letter) < start + _HEADER.size:
        raise FrameError(f"truncated letter of {len(letter)} bytes")
    magic, version, kind, generation, sequence, outer, flags, n_outer, n_ids, n_forks, table, pickled, n_parts, _ = (
        _HEADER.unpack_from(letter, start)
    )
    if magic != _MAGIC or version != _VERSION:
        raise FrameError(
            f"a letter that starts with {magic!r}, version {version}; this side writes {_MAGIC!r}, version {_VERSION}"
        )
    if kind not in KINDS:
        raise FrameError(f"a letter of unknown kind {kind}")
    count = n_outer + n_ids + 2 * n_forks
    place = start + _HEADER.size
    if not count and not outer:
        return Header(kind, generation, sequence, flags=flags, sizes=(table, pickled, n_parts, place))
    if len(letter) < place + 8 * count:
        raise FrameError(f"letter of kind {kind}: {count} numbers announced, cut off after {len(letter)} bytes")
    numbers = struct.unpack_from(f"<{count}Q", letter, place)
    ids, pairs = numbers[n_outer : n_outer + n_ids], numbers[n_outer + n_ids :]
    return Header(
        kind,
        generation,
        sequence,
        ids,
        list(zip(pairs[::2], pairs[1::2], strict=True)) if n_forks else (),
        (outer, numbers[:n_outer]) if outer else None,
        flags=flags,
        sizes=(table, pickled, n_parts, place + 8 * count),
    )


def content_of(header: Header, letter: memoryview, parts: Sequence[Any]) -> Content:
    """Find a complete message's content in its letter and the parts that followed; nothing is copied.

    Raises:
        FrameError: Lengths that do not fit what has come.
    """
    table_bytes, pickle_bytes, count, place = header.sizes
    if not (count or table_bytes or header.flags) and len(letter) == place + pickle_bytes:
        return Content(letter[place:])
    end = place + 8 * count
    if len(letter) < end:
        raise FrameError(f"letter of kind {header.kind}: {count} parts announced, cut off after {len(letter)} bytes")
    lengths = struct.unpack_from(f"<{count}Q", letter, place) if count else ()
    following = list(parts)
    body, place = letter, end
    if header.flags & _FAR_BODY:
        if not following:
            raise FrameError(f"letter of kind {header.kind} without its body")
        body, place = following.pop(0), 0
    end = place + table_bytes + pickle_bytes
    content = Content(body[place + table_bytes : end], body[place : place + table_bytes])
    for length in lengths:
        if length & _OWN_PART:
            if not following or following[0].nbytes != length ^ _OWN_PART:
                raise FrameError(f"letter of kind {header.kind}: a part of {length ^ _OWN_PART} bytes is missing")
            content.parts.append(following.pop(0))
        else:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + length
            content.parts.append(body[start:end])
    if len(body) < end or following:
        raise FrameError(f"letter of kind {header.kind}: {len(body)} bytes and {len(parts)} parts do not hold what it announces")
    return content


def _body(start: bytearray, content: Content) -> bytearray:
    start += content.table
    start += content.pickled
    for part in content.parts:
        if type(part) is bytes:
            start += bytes(-len(start) % _ALIGNMENT)
            start += part
    return start


def _start(letter: memoryview) -> int:
    if len(letter) < 8:
        raise FrameError(f"truncated letter of {len(letter)} bytes")
    return mailbox.envelope_bytes(int.from_bytes(letter[:4], "little"))
