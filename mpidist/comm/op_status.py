"""Status of a group's operations: written by the executing threads, read by the watchdog."""

from __future__ import annotations

import itertools
import os
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# torch's variables for the number of operations that its flight recorder keeps, and its default.
_ENV_KEPT = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_KEPT = 2000
# To read a journal between two operations of another thread.
_ATTEMPTS = 10


class Form(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Description(NamedTuple):
    """An operation without its tensors' memory."""

    operation: str
    inputs: Sequence[Form] = ()
    outputs: Sequence[Form] = ()


class Recorded(NamedTuple):
    """An operation that has ended, or is under way.

    Attributes:
        sequence: Number of the collective on its group.
        begun_ns: A time before it began, in ns since the epoch; 0 if not known.
        ended_ns: A time at which it had ended; None if it is under way or not known.
        is_over: Whether it has ended.
    """

    description: Description
    sequence: int
    begun_ns: int
    ended_ns: int | None
    is_over: bool


class Wait(NamedTuple):
    """A wait for a message, or for the creation of a group.

    Attributes:
        start: ``time.monotonic`` at its start.
        peers: World ranks that the message needs; none for the creation of a group.
    """

    operation: str
    tensor: torch.Tensor | None
    start: float
    peers: Sequence[int]


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

    Every collective calls ``enter`` and ``leave``, which store its description and read no clock.
    The watchdog calls ``observe`` ten times a second, which records the time at which it first sees
    a collective; so the times in ``recorded`` are bounds.

    Attributes:
        group: The group's name.
        key: The group's key.
        sequence: Number of collectives started.
        operation: The name of the last that started.
        tensor: Its tensor while it is under way (None if it has none), else ``IDLE``.
        description: Its description.
        ended: Descriptions of the last operations that ended, the newest last.
        queued: Returns the number of queued operations.
    """

    __slots__ = (
        "_creations",
        "_seen",
        "_ticks",
        "_waits",
        "description",
        "ended",
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
        self.description = Description("none")
        self.ended: deque[Description] = deque(maxlen=_kept(os.environ))
        self.queued = queued
        # Number of operations that had ended, and the time in ns at which the watchdog saw it.
        self._ticks: deque[tuple[int, int]] = deque([(0, time.time_ns())], self.ended.maxlen)
        # The collective that ``observe`` saw last, and the time at which it saw it first.
        self._seen = (0, 0.0)
        self._waits: dict[int, Wait] = {}
        self._creations = itertools.count(1)

    def enter(
        self,
        operation: str,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        """Record the start of a collective; one of its tensors is referenced until ``leave``."""
        self.description = Description(operation, _forms(inputs), _forms(outputs))
        self.sequence += 1
        self.operation = operation
        self.tensor = outputs[0] if outputs else inputs[0] if inputs else None

    def leave(self) -> None:
        """Record the end of the collective."""
        self.tensor = IDLE
        self.ended.append(self.description)

    def enter_wait(
        self,
        key: int,
        operation: str,
        tensor: torch.Tensor | None,
        peers: Sequence[int] = (),
    ) -> None:
        """Record that a thread waits for a message that needs the world ranks ``peers``."""
        self._waits[key] = Wait(operation, tensor, time.monotonic(), peers)

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
        ages = [(now - wait.start, key) for key, wait in list(self._waits.items()) if key < 0]
        age, key = max(ages, default=(0.0, 0))
        return key, age

    def observe(self) -> float:
        """Return the seconds since the collective under way was first seen; 0 if none is.

        Called by one thread; the interval between its calls is the error.
        """
        sequence, is_idle = self.sequence, self.tensor is IDLE
        over = sequence if is_idle else sequence - 1
        if self._ticks and over != self._ticks[-1][0]:
            self._ticks.append((over, time.time_ns()))
        if is_idle:
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
        return [
            now,
            *(
                self._entry(wait.operation, wait.tensor, clock - wait.start, 0)
                for wait in self.waits()
            ),
        ]

    def waits(self) -> list[Wait]:
        """Return the waits for messages, and for groups, that are under way."""
        return list(self._waits.values())

    def recorded(self) -> list[Recorded]:
        """Return the last operations, the oldest first, and then the one under way.

        Called by any thread, while others enter and leave operations.
        """
        for _ in range(_ATTEMPTS):
            is_idle, sequence, current = self.tensor is IDLE, self.sequence, self.description
            ended, ticks = list(self.ended), list(self._ticks)
            if (self.tensor is IDLE, self.sequence) == (is_idle, sequence):
                break
        over = sequence if is_idle else sequence - 1
        first = over - len(ended) + 1
        counts, times = [count for count, _ in ticks], [at for _, at in ticks]
        found = [
            Recorded(description, number, *_bounds(counts, times, number), is_over=True)
            for number, description in enumerate(ended, first)
        ]
        if not is_idle and self.ended.maxlen:
            begun_ns, _ = _bounds(counts, times, sequence)
            found.append(Recorded(current, sequence, begun_ns, None, is_over=False))
        return found

    def _entry(
        self, operation: str, tensor: torch.Tensor | None, seconds: float, sequence: int
    ) -> Entry:
        shape = tuple(tensor.shape) if tensor is not None else None
        dtype = str(tensor.dtype) if tensor is not None else None
        return Entry(
            self.group, self.key, sequence, operation, shape, dtype, seconds, self.queued()
        )


def _kept(environ: Mapping[str, str]) -> int:
    """Return the number of operations that a group keeps; 0 for none."""
    text = next((environ[name] for name in _ENV_KEPT if environ.get(name)), str(_KEPT))
    return max(int(text), 0) if text.strip().lstrip("-").isdigit() else _KEPT


def _forms(tensors: Sequence[torch.Tensor]) -> tuple[Form, ...]:
    return tuple([Form(tensor.shape, tensor.dtype) for tensor in tensors])


def _bounds(counts: Sequence[int], times: Sequence[int], sequence: int) -> tuple[int, int | None]:
    """Return the last time at which an operation had not begun, and the first after its end.

    Args:
        counts: Numbers of operations that had ended, ascending.
        times: The time of each, in ns.
        sequence: The operation's number.
    """
    before, after = bisect_right(counts, sequence - 1), bisect_left(counts, sequence)
    return times[before - 1] if before else 0, times[after] if after < len(times) else None
