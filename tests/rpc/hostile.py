"""Worker that hostile messages are sent to: its list, what must never run, and its log."""

from __future__ import annotations

import logging
import struct
from typing import Any

import msgspec
import numpy as np
import torch

import mpidist.nn  # noqa: F401  # remote modules travel by a rule of their own
import mpidist.rpc as rpc

ECHO, TOUCHED = f"{__name__}:echo", f"{__name__}:touched"
_MOST_DENSE = 1 << 20

# What ran that no list admits.
fired: list[str] = []
encode = msgspec.msgpack.encode


def fire(*args: Any) -> str:
    """Record that code outside of the list has run."""
    fired.append(repr(args))
    return "fired"


class Bomb:
    """An object whose pickle calls ``fire``."""

    def __reduce__(self) -> Any:
        return fire, ("pickle",)


class Bird:
    """An unlisted class: all that runs on it is noted."""

    def __init__(self, *args: Any) -> None:
        fire("Bird.__init__")

    @property
    def song(self) -> str:
        """Note that a property ran."""
        return fire("Bird.song")

    def sing(self) -> str:
        """Note that a method ran."""
        return fire("Bird.sing")

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return fire(f"Bird.__getattr__({name})")


class Nest:
    """An unlisted class from which a listed one inherits."""

    def inherited(self) -> str:
        """Note that a method ran that the listed class does not define."""
        return fire("Nest.inherited")


class Box(Nest):
    """A listed class."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def get(self) -> Any:
        """Return the value."""
        return self.value

    def _hidden(self) -> str:
        return fire("Box._hidden")

    @property
    def price(self) -> str:
        """Note that a property of a listed class ran."""
        return fire("Box.price")


class Records(logging.Handler):
    """Keeps the texts of what was logged, tracebacks included."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(self.format(record))


log = Records()


def look() -> tuple[list[str], list[str]]:
    """Return what ran that is not listed, and what was logged since the last look."""
    texts = list(log.texts)
    del log.texts[: len(texts)]
    return list(fired), texts


def echo(*args: Any, **kwargs: Any) -> Any:
    """Return the arguments."""
    return (args, kwargs) if kwargs else args


def touched(*args: Any) -> list[str]:
    """Read all elements of tensors and arrays, as a computation would; return descriptions."""
    return [_touch(item) for item in args]


def _touch(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        # A sparse tensor may claim any size: a listed function must check the size itself.
        whole = (
            item.to_dense()
            if item.layout is not torch.strided and item.numel() <= _MOST_DENSE
            else item
        )
        copy = whole.clone()
        total = copy.view(-1).float().sum() if copy.layout is torch.strided else copy.sum()
        return f"{whole.shape} {total}"
    if isinstance(item, np.ndarray):
        return f"{item.shape} {item!r}"
    return repr(item)


def bird() -> Any:
    """Return an instance of an unlisted class, without running its constructor."""
    return Bird.__new__(Bird)


def shared() -> Any:
    """Return a reference to a value of this worker's own."""
    return rpc.RRef("a value of its own")


def asked(to: int) -> tuple[bool, str]:
    """Call another worker; return whether the call failed, and what its answer looks like here."""
    try:
        return False, repr(rpc.rpc_sync(to, echo, args=(1,), timeout=3))
    except Exception as error:
        return True, f"{type(error).__module__}.{type(error).__qualname__}: {error}"


LISTED = [look, echo, touched, bird, shared, asked, Box, torch.add]


# MessagePack written by hand.


def ext(code: int, data: bytes, announced: int | None = None) -> bytes:
    """Write an extension type; ``announced`` in the place of its length."""
    return b"\xc9" + struct.pack(">Ib", len(data) if announced is None else announced, code) + data


def array(*items: bytes) -> bytes:
    """Write an array of what is written already."""
    return b"\xdd" + struct.pack(">I", len(items)) + b"".join(items)


def own(code: int, *values: Any) -> bytes:
    """Write an extension type with an array of plain values."""
    return ext(code, array(*map(encode, values)))
