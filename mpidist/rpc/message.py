"""Message kinds of RPC, and the layout of their headers.

::

    autograd message u64                                             (flag AUTOGRAD)
    references n u16 | n × (reference u64, fork u64, owner u32)      (flag REFERENCES)
    calls: name's length u16 | function's name;  before it in remote calls: reference u64 | fork u64
    gradients: four numbers (``GRADIENTS``)
    content (``codec``); with flag FAR the first part of the message is the content

Kinds below 32 are requests; kinds 32 to 47 are answers; kinds from 48 on are one-way messages. The
context of distributed autograd is a field of every message (``comm.transport``).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence

from mpidist.comm.serialization.tensor_format import Buffer
from mpidist.comm.transport.eager_message import EAGER_BYTES
from mpidist.errors import FrameError

# Flags of a message; ``codec`` has the lower ones.
FAR = 16  # the content is the first part
AUTOGRAD = 32  # distributed autograd has recorded the message under a number
REFERENCES = 64  # the header has references, which the owner counts on arrival
# The content begins with the references, which were announced ahead: too many for a header.
ANNOUNCED = 128
MAX_REFERENCES = 512  # in a header

ReferenceRow = tuple[int, int, int]  # reference, fork, owner's rank

WORD = struct.Struct("<Q")
PAIR = struct.Struct("<QQ")
COUNT = struct.Struct("<H")
REFERENCE = struct.Struct("<QQI")
ONE_REFERENCE = struct.Struct("<HQQI")
# Context, pass, number of the message that had the tensors, whether the graph is retained.
GRADIENTS = struct.Struct("<QQQB")
_COUNT32 = struct.Struct("<I")
ROOM_BYTES = EAGER_BYTES - 1024  # for a header and a content without parts


class Kind(enum.IntEnum):
    """Kinds of messages. The registered engine handles those of autograd (``interceptor``)."""

    CALL_PYTHON = 1
    CALL_BUILTIN = 2
    CALL_SCRIPT = 3
    CALL_METHOD = 4  # the first argument is the reference
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
    REQUEST_GRADIENTS = 66  # sent with the device maps of answers


# Difference between a kind of ``remote`` and the same kind of call.
TO_REMOTE = int(Kind.REMOTE_PYTHON - Kind.CALL_PYTHON)
FIRST_REMOTE, LAST_REMOTE = int(Kind.REMOTE_PYTHON), int(Kind.REMOTE_METHOD)
FIRST_RESPONSE, FIRST_ONE_WAY = 32, 48


def pack_references(rows: Sequence[ReferenceRow]) -> bytes:
    """Pack the references of a header, at most ``MAX_REFERENCES``."""
    return COUNT.pack(len(rows)) + b"".join([REFERENCE.pack(*row) for row in rows])


def unpack_references(data: Buffer, offset: int) -> tuple[list[ReferenceRow], int]:
    """Unpack the references at ``offset``; return them and the offset behind them.

    Raises:
        FrameError: They are cut off.
    """
    return _unpack_rows(data, offset, COUNT)


def pack_announced(rows: Sequence[ReferenceRow]) -> bytes:
    """Pack the references that precede a content."""
    return _COUNT32.pack(len(rows)) + b"".join([REFERENCE.pack(*row) for row in rows])


def unpack_announced(data: Buffer, offset: int) -> tuple[list[ReferenceRow], int]:
    """Unpack the references that precede a content; return them and the offset behind them.

    Raises:
        FrameError: They are cut off.
    """
    return _unpack_rows(data, offset, _COUNT32)


def _unpack_rows(
    data: Buffer, offset: int, counter: struct.Struct
) -> tuple[list[ReferenceRow], int]:
    try:
        (count,) = counter.unpack_from(data, offset)
        start = offset + counter.size
        end = start + count * REFERENCE.size
        if end > len(data):
            raise FrameError(f"{count} references announced, cut off after {len(data)} bytes")
        return [REFERENCE.unpack_from(data, at) for at in range(start, end, REFERENCE.size)], end
    except (struct.error, TypeError) as error:  # TypeError: a part on a device
        raise FrameError(f"references are cut off after {len(data)} bytes") from error


def pack_words(words: Iterable[int]) -> bytes:
    """Pack the numbers of a message without content."""
    words = tuple(words)
    return struct.pack(f"<{len(words)}Q", *words)


def unpack_words(data: Buffer, start: int, end: int) -> tuple[int, ...]:
    """Unpack the numbers of a message without content.

    Raises:
        FrameError: The length is not a multiple of a number's.
    """
    if (end - start) % WORD.size:
        raise FrameError(f"{end - start} bytes are no row of numbers")
    return struct.unpack_from(f"<{(end - start) // WORD.size}Q", data, start)


def unpack_pairs(data: Buffer, start: int, end: int) -> list[tuple[int, int]]:
    """Unpack the (reference, fork) pairs of a message without content.

    Raises:
        FrameError: The length is not a multiple of a pair's.
    """
    if (end - start) % PAIR.size:
        raise FrameError(f"{end - start} bytes are no row of pairs")
    return list(PAIR.iter_unpack(memoryview(data)[start:end]))


def pack_forks(holder: int, pairs: Iterable[tuple[int, int]]) -> bytes:
    """Pack the (reference, fork) pairs that are announced for one holder."""
    return WORD.pack(holder) + b"".join([PAIR.pack(*pair) for pair in pairs])


def unpack_forks(data: Buffer, start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """Unpack a holder's rank, and the (reference, fork) pairs that are announced for it.

    Raises:
        FrameError: They are cut off.
    """
    (holder,) = unpack_ids(data, start, end, 1)
    return holder, unpack_pairs(data, start + WORD.size, end)


def unpack_ids(data: Buffer, offset: int, end: int, count: int) -> tuple[int, ...]:
    """Unpack ``count`` numbers of a header.

    Raises:
        FrameError: They are cut off.
    """
    if end - offset < WORD.size * count:
        raise FrameError(f"{count} numbers announced, cut off after {end - offset} bytes")
    return struct.unpack_from(f"<{count}Q", data, offset)


def unpack_gradients(data: Buffer, offset: int, end: int) -> tuple[int, int, int, int]:
    """Unpack the four numbers of ``GRADIENTS``.

    Raises:
        FrameError: They are cut off.
    """
    if end - offset < GRADIENTS.size:
        raise FrameError(f"gradients are cut off after {end - offset} bytes")
    numbers: tuple[int, int, int, int] = GRADIENTS.unpack_from(data, offset)
    return numbers


def unpack_name(data: Buffer, offset: int, end: int) -> tuple[bytes, int]:
    """Unpack a function's name; return the name and the offset behind it.

    Raises:
        FrameError: The name is cut off.
    """
    start = offset + 2
    if start > end:
        raise FrameError("a call without a name")
    offset = start + data[start - 2] + 256 * data[start - 1]
    if offset > end:
        raise FrameError("a call's name is cut off")
    return bytes(data[start:offset]), offset
