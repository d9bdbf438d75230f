"""Victim: the functions of its list, and the report of its state after an attack."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import numpy as np
import torch

import mpidist.nn  # noqa: F401  # remote modules travel by a rule of their own
import mpidist.rpc as rpc
from mpidist.rpc import current
from tests.rpc.attacks import canary

_MOST_DENSE = 1 << 20


class Records(logging.Handler):
    """Keeps the texts of what was logged, tracebacks included."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(self.format(record))


log = Records()


def look() -> tuple[list[str], list[str], list[str]]:
    """Return what the canary noted, this worker's list, and what was logged since the last look."""
    texts = list(log.texts)
    del log.texts[: len(texts)]
    return list(canary.fired), entries(), texts


def entries() -> list[str]:
    """Return this worker's list as texts."""
    return sorted(map(str, current.require().allowed.entries()))


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
        whole = whole.dequantize() if whole.is_quantized else whole
        copy = whole.clone()
        total = copy.view(-1).float().sum() if copy.layout is torch.strided else copy.sum()
        return f"{whole.shape} {total}"
    if isinstance(item, np.ndarray):
        return f"{item.shape} {item!r}"
    return repr(item)


def bird() -> Any:
    """Return an instance of an unlisted class."""
    return canary.silent_bird()


def shared() -> Any:
    """Return a reference to a value of this worker's own."""
    return rpc.RRef("a value of its own")


def error_of(number: int) -> Exception:
    """Return an exception as a value."""
    return ValueError(number)


def asked(to: int) -> tuple[bool, str]:
    """Call another worker; return whether the call failed, and what its answer looks like here."""
    try:
        return False, repr(rpc.rpc_sync(to, echo, args=(1,), timeout=3))
    except Exception as error:
        return True, f"{type(error).__module__}.{type(error).__qualname__}: {error}"


def fetched(to: int) -> tuple[bool, str]:
    """Make a value on another worker and fetch it; return as ``asked`` does."""
    try:
        return False, repr(rpc.remote(to, echo, args=(1,), timeout=3).to_here(timeout=3))
    except Exception as error:
        return True, f"{type(error).__module__}.{type(error).__qualname__}: {error}"


class Box(canary.Nest):
    """A listed class."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def get(self) -> Any:
        """Return the value."""
        return self.value

    def _hidden(self) -> str:
        return canary.fire("Box._hidden")

    @property
    def price(self) -> str:
        """Note that a property of a listed class ran."""
        return canary.fire("Box.price")

    def __reduce__(self) -> Any:
        return canary.fire, ("Box.__reduce__",)


@dataclasses.dataclass
class Point:
    """A listed record."""

    x: Any = 0
    y: Any = 0

    def __post_init__(self) -> None:
        canary.fire("Point.__post_init__")


class Pair(NamedTuple):
    """A listed named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Unlisted:
    """A record that is not listed."""

    x: Any = 0


LISTED = [look, echo, touched, bird, shared, error_of, asked, fetched, Box, Point, Pair, torch.add]
