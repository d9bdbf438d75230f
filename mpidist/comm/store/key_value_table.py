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

# A request's number has one, so that no thread receives the reply to another. The reply repeats the
# number: a request that an exception has left is answered all the same, under a tag that has come
# to another one meanwhile.
REPLY_TAGS = range(16, 16 + (1 << 14))
BYE = "bye"  # a client's last request, without a reply
WAIT = "wait"  # executed by the server, not by the table

_MOST_SECONDS = 1e9
_NUMBERS = range(1 << 63)


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
        """Add to a number, 0 if not set or empty; return the sum.

        Raises:
            ValueError: The present value is not a number.
        """
        held = self._values.get(key, b"")
        try:
            total = int(held or 0) + amount
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


def reply_tag(number: int) -> int:
    """Return the tag of the reply to a request."""
    return REPLY_TAGS[number % len(REPLY_TAGS)]


def request(number: int, verb: str, args: Sequence[object]) -> bytes:
    """Return the bytes of a request."""
    return bytes(frame.to_bytes([number, verb, list(args)], data_only=True))


def request_of(data: bytearray) -> tuple[int, str, list[Any]]:
    """Return number, verb and arguments of a request.

    Raises:
        FrameError: The bytes are not a request.
    """
    decoded = frame.from_bytes(data, data_only=True)
    if type(decoded) is not list or len(decoded) != 3:
        raise FrameError("a request to the store is a number, a verb and its arguments")
    number, verb, args = decoded
    if type(verb) is not str or verb not in _ARGUMENTS:
        raise FrameError("a request to the store asks for an unknown verb")
    if type(number) is not int or number not in _NUMBERS:
        raise FrameError(f"a request to the store, {verb}, has a number that is none")
    kinds = _ARGUMENTS[verb]
    if (
        type(args) is not list
        or len(args) != len(kinds)
        or not all(fits(arg) for fits, arg in zip(kinds, args, strict=True))
    ):
        raise FrameError(f"a request to the store, {verb}, has other arguments than that verb")
    return number, verb, args


def reply(number: int, answer: object, problem: str | None = None) -> bytes:
    """Return the bytes of the reply to a request: the answer, or the error's text."""
    return bytes(frame.to_bytes([number, answer, problem], data_only=True))


def reply_of(data: bytearray) -> tuple[int, Any, str | None]:
    """Return the request's number, the answer and the error's text of a reply.

    Raises:
        FrameError: The bytes are not a reply.
    """
    decoded = frame.from_bytes(data, data_only=True)
    if (
        type(decoded) is not list
        or len(decoded) != 3
        or type(decoded[0]) is not int
        or type(decoded[2]) not in (str, type(None))
    ):
        raise FrameError("a reply of the store is a number, an answer and a problem")
    return decoded[0], decoded[1], decoded[2]
