"""Writer of pickles, opcode by opcode."""

from __future__ import annotations

import pickle
import pickletools
import struct
from typing import Any

PROTO = b"\x80\x04"
STOP = b"."


def plain(value: Any) -> bytes:
    """Push plain data."""
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def text(value: str) -> bytes:
    """Push a string."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def named(module: str, name: str) -> bytes:
    """Push what a module has under a (dotted) name: STACK_GLOBAL."""
    return text(module) + text(name) + b"\x93"


def called(function: bytes, *args: bytes) -> bytes:
    """Call: MARK, arguments, TUPLE, REDUCE."""
    return function + b"(" + b"".join(args) + b"tR"


def items(*values: bytes) -> bytes:
    """Push a tuple."""
    return b"(" + b"".join(values) + b"t"


def mapping(**values: bytes) -> bytes:
    """Push a dict."""
    return b"}(" + b"".join(text(name) + value for name, value in values.items()) + b"u"


def built(obj: bytes, state: bytes) -> bytes:
    """Give an object a state: BUILD."""
    return obj + state + b"b"


def with_slots(obj: bytes, **attributes: bytes) -> bytes:
    """Set attributes of any object: BUILD with the state of an object with slots."""
    return built(obj, items(b"N", mapping(**attributes)))


def kept(place: int, obj: bytes) -> bytes:
    """Push an object and note it under a number: PUT."""
    return obj + b"r" + struct.pack("<I", place)


def again(place: int) -> bytes:
    """Push what a number stands for: GET."""
    return b"j" + struct.pack("<I", place)


def dropped(obj: bytes) -> bytes:
    """Make an object and take it off the stack."""
    return obj + b"0"


def whole(*parts: bytes) -> bytes:
    """Return a pickle; its last part is its object."""
    return PROTO + b"".join(parts) + STOP
