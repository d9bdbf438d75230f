"""Messages between watchdogs (pure): frames of data, whose contents are checked.

No message may end the watchdog's thread, because the thread reports the hangs of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields
from typing import Any

from mpidist.comm.op_status import Entry
from mpidist.comm.serialization import frame
from mpidist.errors import FrameError

ASK, ANSWER, PRINTED, FAILED, LEFT = "ask", "answer", "printed", "failed", "left"

Subject = tuple[str, str]  # a group's key and the late operation


def encoded(kind: str, number: int, content: Any) -> bytes:
    """Return the bytes of a message.

    Args:
        kind: ASK with (subject, the printer's world rank); ANSWER with entries of journals; PRINTED
            with a subject; FAILED with (a group's key, the report, world ranks that are missing);
            LEFT with the last collective by each group's key.
        number: The number of the question.
    """
    if kind == ANSWER:
        content = [astuple(entry) for entry in content]
    return bytes(frame.to_bytes((kind, number, content), data_only=True))


def decoded(data: bytearray) -> tuple[str, int, Any]:
    """Return kind, number and content of a message.

    Raises:
        FrameError: The bytes are not a message.
    """
    value = frame.from_bytes(data, data_only=True)
    if type(value) is not tuple or len(value) != 3 or not _are(value[:2], str, int):
        raise FrameError("it has no kind, number and content")
    kind, number, content = value
    if kind not in _CONTENTS or not _CONTENTS[kind](content):
        raise FrameError("its kind is unknown, or its content none of that kind")
    return kind, number, [Entry(*row) for row in content] if kind == ANSWER else content


def _are(value: object, *types: type) -> bool:
    return type(value) is tuple and tuple(map(type, value)) == types


def _is_subject(value: object) -> bool:
    return _are(value, str, str)


def _is_entry(row: object) -> bool:
    if (
        type(row) is not tuple
        or len(row) != len(fields(Entry))
        or not _are(row[:4], str, str, int, str)
    ):
        return False
    shape, dtype, seconds, queued = row[4:]
    return (
        (shape is None or (type(shape) is tuple and all(type(size) is int for size in shape)))
        and type(dtype) in (str, type(None))
        and type(seconds) in (float, type(None))
        and type(queued) is int
    )


def _are_ranks(value: object) -> bool:
    return type(value) is tuple and all(type(rank) is int for rank in value)


# Check of the content of each kind.
_CONTENTS: dict[str, Callable[[Any], bool]] = {
    ASK: lambda value: _are(value, tuple, int) and _is_subject(value[0]),
    ANSWER: lambda value: type(value) is list and all(map(_is_entry, value)),
    PRINTED: _is_subject,
    FAILED: lambda value: _are(value, str, str, tuple) and _are_ranks(value[2]),
    LEFT: lambda value: (
        type(value) is dict
        and all(type(key) is str and type(last) is int for key, last in value.items())
    ),
}
