"""Messages between watchdogs (pure): frames of data, whose contents are checked.

No message may end the watchdog's thread, because the thread reports the hangs of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

from mpidist.comm.execution.op_status import Call, Entry, History
from mpidist.comm.serialization import frame
from mpidist.comm.watchdog import last_operations
from mpidist.comm.watchdog.arrivals import Arrivals
from mpidist.comm.watchdog.last_operations import LastOperations
from mpidist.errors import FrameError

ASK, ANSWER, PRINTED, FAILED, LEFT = "ask", "answer", "printed", "failed", "left"
ARRIVALS = "arrivals"

Subject = tuple[str, str]  # a group's key and the late operation


_UNKNOWN, _NONE = History(), LastOperations()


@dataclass(frozen=True)
class Answer:
    """State of a rank.

    Attributes:
        entries: Its operations on the group of the question, and those under way on others.
        places: Lines on its threads.
        history: Its last collectives on the group of the question.
        last: What its recorder has.
    """

    entries: list[Entry]
    places: tuple[str, ...] = ()
    history: History = _UNKNOWN
    last: LastOperations = _NONE


def encoded(kind: str, number: int, content: Any) -> bytes:
    """Return the bytes of a message.

    Args:
        kind: ASK with (subject, the printer's world rank); ANSWER with an ``Answer``; PRINTED
            with a subject; FAILED with (a group's key, the report, world ranks that are missing);
            LEFT with the ``History`` of each group by its key; ARRIVALS with the ``Arrivals`` of
            each group.
        number: The number of the question.
    """
    if kind == ANSWER:
        content = (
            [astuple(entry) for entry in content.entries],
            content.places,
            _plain(content.history),
            last_operations.plain(content.last),
        )
    elif kind == LEFT:
        content = {key: _plain(history) for key, history in content.items()}
    elif kind == ARRIVALS:
        content = [tuple(one) for one in content]
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
    if kind == ANSWER:
        rows, places, history, last = content
        entries = [Entry(*row) for row in rows]
        content = Answer(entries, places, _history(history), last_operations.from_plain(last))
    elif kind == LEFT:
        content = {key: _history(history) for key, history in content.items()}
    elif kind == ARRIVALS:
        content = [Arrivals(*row) for row in content]
    return kind, number, content


def _plain(history: History) -> tuple[int, list[tuple[object, ...]]]:
    return history.sequence, [tuple(call) for call in history.calls]


def _history(value: tuple[int, list[tuple[Any, ...]]]) -> History:
    sequence, calls = value
    return History(sequence, tuple(Call(*row) for row in calls))


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
    shape, dtype, seconds, *rest = row[4:]
    return (
        _is_form(shape, dtype)
        and type(seconds) in (float, type(None))
        and _are(tuple(rest), int, int, bool)
    )


def _is_form(shape: object, dtype: object) -> bool:
    return (
        shape is None or (type(shape) is tuple and all(type(size) is int for size in shape))
    ) and type(dtype) in (str, type(None))


def _is_history(value: object) -> bool:
    if not _are(value, int, list):
        return False
    assert isinstance(value, tuple)
    return all(
        type(row) is tuple and len(row) == 3 and type(row[0]) is str and _is_form(*row[1:])
        for row in value[1]
    )


def _is_answer(value: object) -> bool:
    if not _are(value, list, tuple, tuple, tuple):
        return False
    assert isinstance(value, tuple)
    entries, places, history, last = value
    return (
        all(map(_is_entry, entries))
        and all(type(place) is str for place in places)
        and _is_history(history)
        and last_operations.is_plain(last)
    )


def _are_ranks(value: object) -> bool:
    return type(value) is tuple and all(type(rank) is int for rank in value)


# Check of the content of each kind.
_CONTENTS: dict[str, Callable[[Any], bool]] = {
    ASK: lambda value: _are(value, tuple, int) and _is_subject(value[0]),
    ANSWER: _is_answer,
    PRINTED: _is_subject,
    FAILED: lambda value: _are(value, str, str, tuple) and _are_ranks(value[2]),
    LEFT: lambda value: (
        type(value) is dict
        and all(type(key) is str and _is_history(history) for key, history in value.items())
    ),
    ARRIVALS: lambda value: (
        type(value) is list and all(_are(row, str, str, int, int, bytes) for row in value)
    ),
}
