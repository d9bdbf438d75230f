"""Messages between watchdogs (pure): frames of data, checked before anything of them is believed.

A watchdog's thread must outlive whatever comes: it is what reports that others hang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields
from typing import Any

from mpidist.comm.op_status import Entry
from mpidist.comm.serialization import frame
from mpidist.errors import FrameError

ASK, ANSWER, PRINTED, FAILED, LEFT = "ask", "answer", "printed", "failed", "left"

Subject = tuple[str, str]  # a group's key, and what of it is late


def encoded(kind: str, number: int, content: Any) -> bytes:
    """Return the bytes of a message.

    Args:
        kind: ASK with (subject, the printer's world rank); ANSWER with entries of journals; PRINTED
            with a subject; FAILED with (a group's key, the report, world ranks that are missing);
            LEFT with the last collective by each group's key.
        number: Of the question.
    """
    if kind == ANSWER:
        content = [astuple(entry) for entry in content]
    return bytes(frame.to_bytes((kind, number, content), data_only=True))


def decoded(data: Any) -> tuple[str, int, Any]:
    """Return kind, number and content of a message.

    Raises:
        FrameError: The bytes are none.
    """
    told = frame.from_bytes(data, data_only=True)
    if type(told) is not tuple or len(told) != 3 or not _are(told[:2], str, int):
        raise FrameError("it has no kind, number and content")
    kind, number, content = told
    if kind not in _CONTENTS or not _CONTENTS[kind](content):
        raise FrameError("its kind is unknown, or its content none of that kind")
    return kind, number, [Entry(*row) for row in content] if kind == ANSWER else content


def _are(value: Any, *types: type) -> bool:
    return type(value) is tuple and tuple(map(type, value)) == types


def _is_subject(value: Any) -> bool:
    return _are(value, str, str)


def _is_entry(row: Any) -> bool:
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


def _are_ranks(value: Any) -> bool:
    return type(value) is tuple and all(type(rank) is int for rank in value)


# For each kind what its content must be.
_CONTENTS: dict[str, Callable[[Any], bool]] = {
    ASK: lambda told: _are(told, tuple, int) and _is_subject(told[0]),
    ANSWER: lambda told: type(told) is list and all(map(_is_entry, told)),
    PRINTED: _is_subject,
    FAILED: lambda told: _are(told, str, str, tuple) and _are_ranks(told[2]),
    LEFT: lambda told: (
        type(told) is dict
        and all(type(key) is str and type(last) is int for key, last in told.items())
    ),
}
