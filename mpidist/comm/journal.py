"""What each group of this process is doing, written by the caller in a few instructions and read by the watchdog."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One operation under way, or the last that ended, as plain data that can be sent to another rank."""

    group: str
    sequence: int  # collectives started on this group by this rank, this one included; 0 for point-to-point
    operation: str
    shape: tuple[int, ...] | None
    dtype: str | None
    seconds: float | None  # time inside the operation; None: it has ended
    queued: int  # operations waiting behind it

    def __str__(self) -> str:
        what = self.operation + (f"(shape={self.shape}, dtype={self.dtype})" if self.shape is not None else "()")
        number = f" number {self.sequence}" if self.sequence else ""
        if self.seconds is None:
            return f'outside any collective of group "{self.group}"; the last was{number or " none"} {what}'
        behind = f", {self.queued} queued behind it" if self.queued else ""
        return f'in{number} {what} of group "{self.group}" for {self.seconds:.1f} s{behind}'


class Journal:
    """The operation a group is executing, and the point-to-point waits beside it.

    ``enter`` and ``leave`` are on the path of every collective: they store one tuple each and take no lock, because a group
    executes one collective at a time.
    """

    __slots__ = ("_now", "_waits", "group", "last", "queued", "sequence")

    def __init__(self, group: str) -> None:
        self.group = group
        self.sequence = 0
        self.queued = 0
        self.last = "none"
        self._now: tuple[str, Any, float] | None = None
        self._waits: dict[int, tuple[str, Any, float]] = {}

    def enter(self, operation: str, tensor: Any) -> None:
        """Note that a collective starts; ``tensor`` (or None) is referenced until ``leave``."""
        self.sequence += 1
        self.last = operation
        self._now = (operation, tensor, time.monotonic())

    def leave(self) -> None:
        """Note that it has ended."""
        self._now = None

    def enter_wait(self, key: int, operation: str, tensor: Any) -> None:
        """Note that a thread starts to wait for a point-to-point operation."""
        self._waits[key] = (operation, tensor, time.monotonic())

    def leave_wait(self, key: int) -> None:
        """Note that it no longer waits."""
        self._waits.pop(key, None)

    def collective_age_s(self) -> float:
        """Return for how long the present collective has been running; 0 when there is none."""
        now = self._now
        return time.monotonic() - now[2] if now is not None else 0.0

    def snapshot(self) -> list[Entry]:
        """Return the collective (or that there is none) first, then the point-to-point waits."""
        clock = time.monotonic()
        now = self._now
        if now is None:
            entries = [Entry(self.group, self.sequence, self.last, None, None, None, self.queued)]
        else:
            entries = [self._entry(now, clock, self.sequence)]
        entries += [self._entry(wait, clock, 0) for wait in list(self._waits.values())]
        return entries

    def _entry(self, item: tuple[str, Any, float], clock: float, sequence: int) -> Entry:
        operation, tensor, start = item
        shape = tuple(tensor.shape) if tensor is not None else None
        dtype = str(tensor.dtype) if tensor is not None else None
        return Entry(self.group, sequence, operation, shape, dtype, clock - start, self.queued)
