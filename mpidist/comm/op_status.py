"""Status of a group's operations: written by the executing threads, read by the watchdog."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Entry:
    """One operation under way, or the last that ended, as plain data for another rank.

    Attributes:
        group: The group's name.
        key: The group's key, the same on all its ranks.
        sequence: Number of collectives that this rank has started on the group, with this one; 0
            for a message.
        operation: The name of the operation.
        shape: Of its tensor.
        dtype: Of its tensor.
        seconds: Time since its start; None if it has ended.
        queued: Number of operations queued behind it.
    """

    group: str
    key: str
    sequence: int
    operation: str
    shape: tuple[int, ...] | None
    dtype: str | None
    seconds: float | None
    queued: int

    def __str__(self) -> str:
        what = self.operation + (
            f"(shape={self.shape}, dtype={self.dtype})" if self.shape is not None else "()"
        )
        number = f" number {self.sequence}" if self.sequence else ""
        if self.seconds is None:
            last = (
                f"the last was number {self.sequence}, {self.operation}"
                if self.sequence
                else "there was none yet"
            )
            return f'outside any collective of group "{self.group}"; {last}'
        behind = f", {self.queued} queued behind it" if self.queued else ""
        return f'in{number} {what} of group "{self.group}" for {self.seconds:.1f} s{behind}'


class _Idle:
    """Type of ``IDLE``."""


# Value of ``Journal.tensor`` while no collective is under way.
IDLE: Any = _Idle()


class Journal:
    """The collective that a group executes, and the waits for messages.

    Every collective calls ``enter`` and ``leave``, which store three attributes and read no clock.
    The watchdog calls ``observe`` ten times a second, which records the time at which it first sees
    a collective.

    Attributes:
        group: The group's name.
        key: The group's key.
        sequence: Number of collectives started.
        operation: The name of the last that started.
        tensor: Its tensor while it is under way (None if it has none), else ``IDLE``.
        queued: Returns the number of queued operations.
    """

    __slots__ = (
        "_creations",
        "_seen",
        "_waits",
        "group",
        "key",
        "operation",
        "queued",
        "sequence",
        "tensor",
    )

    def __init__(self, group: str, key: str, queued: Callable[[], int] = int) -> None:
        self.group = group
        self.key = key
        self.sequence = 0
        self.operation = "none"
        self.tensor: Any = IDLE
        self.queued = queued
        # The collective that ``observe`` saw last, and the time at which it saw it first.
        self._seen = (0, 0.0)
        self._waits: dict[int, tuple[str, torch.Tensor | None, float]] = {}
        self._creations = itertools.count(1)

    def enter(self, operation: str, tensor: torch.Tensor | None) -> None:
        """Record the start of a collective; ``tensor`` (or None) is referenced until ``leave``."""
        self.sequence += 1
        self.operation = operation
        self.tensor = tensor

    def leave(self) -> None:
        """Record the end of the collective."""
        self.tensor = IDLE

    def enter_wait(self, key: int, operation: str, tensor: torch.Tensor | None) -> None:
        """Record that a thread waits for a message."""
        self._waits[key] = (operation, tensor, time.monotonic())

    def leave_wait(self, key: int) -> None:
        """Record the end of a wait."""
        self._waits.pop(key, None)

    @contextmanager
    def creating(self, operation: str) -> Iterator[None]:
        """Record that this thread makes a group within the context."""
        key = -next(self._creations)  # the other waits' keys are addresses
        self.enter_wait(key, operation, None)
        try:
            yield
        finally:
            self.leave_wait(key)

    def creation(self) -> tuple[int, float]:
        """Return key and age in seconds of the oldest creation under way; 0 and 0 if none is."""
        now = time.monotonic()
        ages = [(now - start, key) for key, (_, _, start) in list(self._waits.items()) if key < 0]
        age, key = max(ages, default=(0.0, 0))
        return key, age

    def observe(self) -> float:
        """Return the seconds since the collective under way was first seen; 0 if none is.

        Called by one thread; the interval between its calls is the error.
        """
        sequence = self.sequence
        if self.tensor is IDLE:
            return 0.0
        if self._seen[0] != sequence:
            self._seen = (sequence, time.monotonic())
        return time.monotonic() - self._seen[1]

    def snapshot(self) -> list[Entry]:
        """Return the entry of the collective, then those of the waits for messages."""
        tensor = self.tensor
        if tensor is IDLE:
            now = Entry(
                self.group, self.key, self.sequence, self.operation, None, None, None, self.queued()
            )
        else:
            now = self._entry(self.operation, tensor, self.observe(), self.sequence)
        clock = time.monotonic()
        waits = list(self._waits.values())
        return [
            now,
            *(self._entry(name, tensor, clock - start, 0) for name, tensor, start in waits),
        ]

    def _entry(
        self, operation: str, tensor: torch.Tensor | None, seconds: float, sequence: int
    ) -> Entry:
        shape = tuple(tensor.shape) if tensor is not None else None
        dtype = str(tensor.dtype) if tensor is not None else None
        return Entry(
            self.group, self.key, sequence, operation, shape, dtype, seconds, self.queued()
        )
