"""Kinds of messages between workers, and the layout of their headers.

::

    autograd message u64                                             (flag AUTOGRAD)
    references n u16 | n × (reference u64, fork u64, owner u32)      (flag REFERENCES)
    calls: function's name bytes u16 | name;  remote calls: reference u64 | fork u64 before it
    gradients: four numbers (``GRADIENTS``)
    the content (``codec``), or, with flag FAR, nothing: it is the first part

Kinds below 32 are requests: each is answered by one of the kinds from 32 to 47. Those from 48 on
are one-way. The context of distributed autograd is a field of every message (``comm.transport``).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from mpidist.comm.transport.eager_message import EAGER_BYTES
from mpidist.errors import FrameError

FAR = 16  # the content is the first part
AUTOGRAD = 32  # tensors of the message are recorded by distributed autograd under a number
REFERENCES = 64  # references are in the header, and counted by their owner as soon as it arrives
ANNOUNCED = 128  # references are too many for it: they begin the content, and were announced ahead
MAX_REFERENCES = 512  # in a header

ReferenceRow = tuple[int, int, int]  # reference, fork, owner's rank

WORD = struct.Struct("<Q")
PAIR = struct.Struct("<QQ")
COUNT = struct.Struct("<H")
REFERENCE = struct.Struct("<QQI")
ONE_REFERENCE = struct.Struct("<HQQI")
# context, pass, number of the message whose tensors' gradients these are, retain the graph
GRADIENTS = struct.Struct("<QQQB")
_COUNT32 = struct.Struct("<I")
ROOM_BYTES = EAGER_BYTES - 1024  # of a header and a content without parts


class Kind(enum.IntEnum):
    """The kinds.

    Those of distributed autograd are handled by whoever registers for them (``interceptor``).
    """

    CALL_PYTHON = 1
    CALL_BUILTIN = 2
    CALL_SCRIPT = 3
    CALL_METHOD = 4  # of a reference's value: the reference is the first argument
    REMOTE_PYTHON = 5
    REMOTE_BUILTIN = 6
    REMOTE_SCRIPT = 7
    REMOTE_METHOD = 8
    RREF_FETCH = 9
    CALL_SERVICE = 10  # one of ``services``
    BACKWARD_AUTOGRAD = 16
    RESULT = 32
    REMOTE_DONE = 33
    EXCEPTION = 34
    RREF_FORK = 48
    RREF_USER_DELETE = 49
    LEAVE = 50
    QUIET_REPORT = 51
    QUIET_VERDICT = 52
    GRADIENTS = 64
    AUTOGRAD_NOTICE = 65
    REQUEST_GRADIENTS = 66  # of a request's tensors: they go back by the device maps of answers


# from a kind of call to that whose result stays
TO_REMOTE = int(Kind.REMOTE_PYTHON - Kind.CALL_PYTHON)
FIRST_RESPONSE, FIRST_ONE_WAY = 32, 48


def pack_references(rows: Sequence[ReferenceRow]) -> bytes:
    """Write the references of a header: at most ``MAX_REFERENCES``."""
    return COUNT.pack(len(rows)) + b"".join([REFERENCE.pack(*row) for row in rows])


def unpack_references(data: Any, place: int) -> tuple[list[ReferenceRow], int]:
    """Return the references that begin at ``place``, and where they end.

    Raises:
        FrameError: They are cut off.
    """
    try:
        (count,) = COUNT.unpack_from(data, place)
        place += COUNT.size
        return _read_rows(data, place, count)
    except struct.error as error:
        raise FrameError(f"references are cut off after {len(data)} bytes") from error


def _read_rows(data: Any, place: int, count: int) -> tuple[list[ReferenceRow], int]:
    end = place + count * REFERENCE.size
    if end > len(data):
        raise FrameError(f"{count} references announced, cut off after {len(data)} bytes")
    return [REFERENCE.unpack_from(data, start) for start in range(place, end, REFERENCE.size)], end


def pack_announced(rows: Sequence[ReferenceRow]) -> bytes:
    """Write the references that begin a content."""
    return _COUNT32.pack(len(rows)) + b"".join([REFERENCE.pack(*row) for row in rows])


def unpack_announced(data: Any, place: int) -> tuple[list[ReferenceRow], int]:
    """Return the references that begin a content, and where they end.

    Raises:
        FrameError: They are cut off.
    """
    try:
        (count,) = _COUNT32.unpack_from(data, place)
        place += _COUNT32.size
        return _read_rows(data, place, count)
    except (struct.error, TypeError) as error:  # a part on a device is no buffer
        raise FrameError(f"references are cut off after {len(data)} bytes") from error


def pack_words(words: Iterable[int]) -> bytes:
    """Write the numbers of a message without content."""
    words = tuple(words)
    return struct.pack(f"<{len(words)}Q", *words)


def unpack_words(data: Any, start: int, end: int) -> tuple[int, ...]:
    """Return the numbers of a message without content.

    Raises:
        FrameError: Not whole numbers.
    """
    if (end - start) % WORD.size:
        raise FrameError(f"{end - start} bytes are no row of numbers")
    return struct.unpack_from(f"<{(end - start) // WORD.size}Q", data, start)


def unpack_pairs(data: Any, start: int, end: int) -> list[tuple[int, int]]:
    """Return the (reference, fork) pairs of a message without content.

    Raises:
        FrameError: Not whole pairs.
    """
    if (end - start) % PAIR.size:
        raise FrameError(f"{end - start} bytes are no row of pairs")
    return list(PAIR.iter_unpack(memoryview(data)[start:end]))


def unpack_ids(data: Any, place: int, end: int, count: int) -> tuple[int, ...]:
    """Return the numbers with which a header's part for its kind begins.

    Raises:
        FrameError: They are cut off.
    """
    if end - place < WORD.size * count:
        raise FrameError(f"{count} numbers announced, cut off after {end - place} bytes")
    return struct.unpack_from(f"<{count}Q", data, place)


def unpack_gradients(data: Any, place: int, end: int) -> tuple[int, int, int, int]:
    """Return what stands before the content of a message of gradients.

    Raises:
        FrameError: It is cut off.
    """
    if end - place < GRADIENTS.size:
        raise FrameError(f"gradients are cut off after {end - place} bytes")
    found: tuple[int, int, int, int] = GRADIENTS.unpack_from(data, place)
    return found


def unpack_name(data: Any, place: int, end: int) -> tuple[bytes, int]:
    """Return a function's name, and where it ends.

    Raises:
        FrameError: It is cut off.
    """
    start = place + 2
    if start > end:
        raise FrameError("a call without a name")
    place = start + data[start - 2] + 256 * data[start - 1]
    if place > end:
        raise FrameError("a call's name is cut off")
    return bytes(data[start:place]), place
