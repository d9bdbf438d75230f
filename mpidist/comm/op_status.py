"""Journal of a group's operations, written by the calling thread in a few instructions and read by the watchdog."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One operation under way, or the last that ended, as plain data that can be sent to another rank."""

    group: str
    key: str  # the group's, unique and the same on all its ranks
    # collectives started on this group by this rank, this one included; 0 for point-to-point
    sequence: int
    operation: str
    shape: tuple[int, ...] | None
    dtype: str | None
    seconds: float | None  # time inside the operation; None: it has ended
    queued: int  # operations waiting behind it

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
    """Stands where a collective's tensor would, while there is none."""


IDLE: Any = _Idle()


class Journal:
    """The operation a group is executing, and the point-to-point waits beside it.

    ``enter`` and ``leave`` are on the path of every collective: three stores and no clock, because
    a group executes one collective at a time, and the watchdog, which looks ten times a second,
    notes when it first saw it (``observe``).

    Attributes:
        group: The group's name.
        key: Its key, for the watchdogs.
        sequence: Collectives started so far.
        operation: The one that started last.
        tensor: Its tensor while it is under way (None if it has none), else ``IDLE``.
        queued: Returns the number of operations queued behind it.
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
        self._seen = (0, 0.0)  # the collective that was under way at the last look, and since when
        self._waits: dict[int, tuple[str, Any, float]] = {}
        self._creations = itertools.count(1)

    def enter(self, operation: str, tensor: Any) -> None:
        """Note that a collective starts; ``tensor`` (or None) is referenced until ``leave``."""
        self.sequence += 1
        self.operation = operation
        self.tensor = tensor

    def leave(self) -> None:
        """Note that it has ended."""
        self.tensor = IDLE

    def enter_wait(self, key: int, operation: str, tensor: Any) -> None:
        """Note that a thread starts to wait for a point-to-point operation."""
        self._waits[key] = (operation, tensor, time.monotonic())

    def leave_wait(self, key: int) -> None:
        """Note that it no longer waits."""
        self._waits.pop(key, None)

    def enter_creation(self, operation: str) -> int:
        """Note that a thread makes a group of some of the members; return what ``leave_creation`` takes."""
        key = -next(self._creations)  # the other waits' keys are addresses
        self.enter_wait(key, operation, None)
        return key

    def leave_creation(self, key: int) -> None:
        """Note that it is made."""
        self.leave_wait(key)

    def creation(self) -> tuple[int, float]:
        """Return which group in the making waits the longest, and for how many seconds; 0 and 0 when none is."""
        now = time.monotonic()
        ages = [(now - start, key) for key, (_, _, start) in list(self._waits.items()) if key < 0]
        age, key = max(ages, default=(0.0, 0))
        return key, age

    def observe(self) -> float:
        """Return for how many seconds the present collective has been seen; 0 when there is none.

        Called by one thread alone, in intervals that bound the error.
        """
        sequence = self.sequence
        if self.tensor is IDLE:
            return 0.0
        if self._seen[0] != sequence:
            self._seen = (sequence, time.monotonic())
        return time.monotonic() - self._seen[1]

    def snapshot(self) -> list[Entry]:
        """Return the collective (or that there is none) first, then the point-to-point waits."""
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

    def _entry(self, operation: str, tensor: Any, seconds: float, sequence: int) -> Entry:
        shape = tuple(tensor.shape) if tensor is not None else None
        dtype = str(tensor.dtype) if tensor is not None else None
        return Entry(
            self.group, self.key, sequence, operation, shape, dtype, seconds, self.queued()
        )
