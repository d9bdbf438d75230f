"""Table of the store ``mpi://``, and the format of its requests and replies (pure).

A request names a verb. A verb that is unknown, or whose arguments have other types than listed
here, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm.serialization import frame
from mpidist.errors import FrameError

# One for each request under way, so that no thread receives the reply to another.
REPLY_TAGS = range(16, 16 + (1 << 14))
BYE = "bye"  # a client's last request, without a reply
WAIT = "wait"  # executed by the server, not by the table

_MOST_SECONDS = 1e9


class KeyValueTable:
    """The table; its methods have the meanings of ``torch.distributed.Store``."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._values[key] = value

    def read(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is not set."""
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if not set; return the sum.

        Raises:
            ValueError: The present value is not a number.
        """
        held = self._values.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            raise ValueError(
                f"the store cannot add to {key!r}: its value, {len(held)} bytes, is no number"
            ) from None
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: bytes) -> None:
        """Append bytes to the value."""
        self._values[key] = self._values.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``; return the value.

        A key that is not set matches an empty ``expected``.
        """
        if key not in self._values:
            if expected:
                return expected
            self._values[key] = desired
        elif self._values[key] == expected:
            self._values[key] = desired
        return self._values[key]

    def delete(self, key: str) -> bool:
        """Remove a key; return whether it was set."""
        return self._values.pop(key, None) is not None

    def count(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return all(key in self._values for key in keys)

    def answer(self, verb: str, args: Sequence[object]) -> object:
        """Execute a verb; return its result.

        Raises:
            ValueError: The verb is not defined for the present value.
        """
        return _CALLS[verb](self, *args)


_CALLS: dict[str, Callable[..., object]] = {
    "set": KeyValueTable.set,
    "read": KeyValueTable.read,
    "add": KeyValueTable.add,
    "append": KeyValueTable.append,
    "compare_set": KeyValueTable.compare_set,
    "delete": KeyValueTable.delete,
    "count": KeyValueTable.count,
    "has": KeyValueTable.has,
}


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_bytes(value: object) -> bool:
    return type(value) is bytes


def _is_amount(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_texts(value: object) -> bool:
    return type(value) is list and all(type(item) is str for item in value)


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= _MOST_SECONDS


_ARGUMENTS: dict[str, tuple[Callable[[object], bool], ...]] = {
    "set": (_is_text, _is_bytes),
    "read": (_is_text,),
    "add": (_is_text, _is_amount),
    "append": (_is_text, _is_bytes),
    "compare_set": (_is_text, _is_bytes, _is_bytes),
    "delete": (_is_text,),
    "count": (),
    "has": (_is_texts,),
    WAIT: (_is_texts, _is_seconds),
    BYE: (),
}


def request(tag: int, verb: str, args: Sequence[object]) -> bytes:
    """Return the bytes of a request."""
    return bytes(frame.to_bytes([tag, verb, list(args)], data_only=True))


def request_of(data: bytearray) -> tuple[int, str, list[Any]]:
    """Return reply tag, verb and arguments of a request.

    Raises:
        FrameError: The bytes are not a request.
    """
    decoded = frame.from_bytes(data, data_only=True)
    if type(decoded) is not list or len(decoded) != 3:
        raise FrameError("a request to the store is a tag, a verb and its arguments")
    tag, verb, args = decoded
    if type(verb) is not str or verb not in _ARGUMENTS:
        raise FrameError("a request to the store asks for an unknown verb")
    if type(tag) is not int or (tag not in REPLY_TAGS and verb != BYE):
        raise FrameError(
            f"a request to the store, {verb}, asks for an answer under a tag that is none"
        )
    kinds = _ARGUMENTS[verb]
    if (
        type(args) is not list
        or len(args) != len(kinds)
        or not all(fits(arg) for fits, arg in zip(kinds, args, strict=True))
    ):
        raise FrameError(f"a request to the store, {verb}, has other arguments than that verb")
    return tag, verb, args


def reply(answer: object, problem: str | None = None) -> bytes:
    """Return the bytes of a reply: the answer, or the error's text."""
    return bytes(frame.to_bytes([answer, problem], data_only=True))


def answer_of(data: bytearray) -> Any:
    """Return the answer of a reply.

    Raises:
        FrameError: The bytes are not a reply.
        ValueError: The server refused the request.
    """
    decoded = frame.from_bytes(data, data_only=True)
    if type(decoded) is not list or len(decoded) != 2 or type(decoded[1]) not in (str, type(None)):
        raise FrameError("a reply of the store is an answer and a problem")
    answer, problem = decoded
    if problem is not None:
        raise ValueError(problem)
    return answer
