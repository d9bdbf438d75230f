"""Status of a group's operations: written by the executing threads, read by the watchdog."""

from __future__ import annotations

import itertools
import os
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mpidist.comm.recorder.collective_begins import CollectiveBegins, Described, Form
from mpidist.comm.recorder.recorder import Off, Recorder

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# torch's variables for the number of operations that its flight recorder keeps, and its default.
_ENV_KEPT = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_KEPT = 2000
_HISTORY = 32  # calls that another rank compares with its own
# To read a journal between two operations of another thread.
_ATTEMPTS = 10


class Call(NamedTuple):
    """A collective as plain data for another rank: its name, and the form of its tensor."""

    operation: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        form = "" if self.shape is None else f"shape={self.shape}, dtype={self.dtype}"
        return f"{self.operation}({form})"


class History(NamedTuple):
    """The last collectives of a rank on a group.

    Attributes:
        sequence: Number of the last that started.
        calls: The last of them, the newest last; empty if they are not known.
    """

    sequence: int = 0
    calls: tuple[Call, ...] = ()

    def call(self, number: int) -> Call | None:
        """Return the collective of a number; None if it is not known."""
        place = number - self.sequence + len(self.calls) - 1
        return self.calls[place] if 0 <= place < len(self.calls) else None


class Recorded(NamedTuple):
    """An operation that has ended, or is under way.

    Attributes:
        described: Its name, and the forms of its inputs and outputs.
        sequence: Number of the collective on its group.
        begun_ns: A time before it began, in ns since the epoch; 0 if not known.
        ended_ns: A time at which it had ended; None if it is under way or not known.
        is_over: Whether it has ended.
    """

    described: Described
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
        own: Number of collectives among ``sequence`` that mpidist called for itself.
        is_own: Whether this is one of them.
    """

    group: str
    key: str
    sequence: int
    operation: str
    shape: tuple[int, ...] | None
    dtype: str | None
    seconds: float | None
    queued: int
    own: int = 0
    is_own: bool = False

    @property
    def number(self) -> int:
        """Return the number of the user's own calls."""
        return self.sequence - self.own

    @property
    def title(self) -> str:
        """Return the name, and the number of the user's call."""
        if self.is_own:
            return f"{self.operation} of mpidist itself"
        return f"{self.operation} number {self.number}"

    def __str__(self) -> str:
        if self.seconds is None:
            return f'outside any collective of group "{self.group}"; {self._last()}'
        what = str(Call(self.operation, self.shape, self.dtype))
        if self.is_own:
            what += " of mpidist itself" + (f" after number {self.number}" if self.number else "")
        elif self.sequence:
            what = f"number {self.number} {what}"
        behind = f", {self.queued} queued behind it" if self.queued else ""
        return f'in {what} of group "{self.group}" for {self.seconds:.1f} s{behind}'

    def _last(self) -> str:
        if not self.number:
            return "there was none yet"
        # The name of the last of the user's calls is not known behind one of mpidist's.
        return f"the last was number {self.number}" + ("" if self.is_own else f", {self.operation}")


class _Idle:
    """Type of ``IDLE``."""


# Value of ``Journal.tensor`` while no collective is under way.
IDLE: Any = _Idle()


class Journal:
    """The collective that a group executes, and the waits for messages.

    Every collective calls ``enter`` and ``leave``, which store its description, and its begin and
    end in the process's recorder. The watchdog calls ``observe`` ten times a second, which records
    the time at which it first sees a collective; so the times in ``recorded`` are bounds.

    Args:
        group: The group's name.
        key: The group's key.
        queue: The queued operations.
        recorder: The process's.
        label: Of the group in the recorder.

    Attributes:
        group: The group's name.
        key: The group's key.
        sequence: Number of collectives started.
        own: Number of those that mpidist called for itself, which reports do not count.
        operation: The name of the last that started.
        tensor: Its tensor while it is under way (None if it has none), else ``IDLE``.
        described: It, without its tensors' memory.
        ended: The last operations that ended, the newest last.
        queue: The queued operations.
        begins: Begins of the group's collectives in the recorder.
    """

    __slots__ = (
        "_creations",
        "_end",
        "_fail",
        "_outer",
        "_own_sequence",
        "_seen",
        "_ticks",
        "_waits",
        "begins",
        "described",
        "ended",
        "group",
        "key",
        "operation",
        "own",
        "queue",
        "sequence",
        "tensor",
    )

    def __init__(
        self,
        group: str,
        key: str,
        queue: Sized = (),
        recorder: Recorder | None = None,
        label: str = "",
    ) -> None:
        self.group = group
        self.key = key
        self.sequence = 0
        self.own = 0
        self._own_sequence = 0  # of the last of them
        # Of the operation under way that issues others on the group: number, own, name, and the
        # time at which it began to.
        self._outer: tuple[int, int, str, float] | None = None
        self.operation = "none"
        self.tensor: Any = IDLE
        self.described: Described = ("none", (), ())
        self.ended: deque[Described] = deque(maxlen=_kept(os.environ))
        self.queue = queue
        # Number of operations that had ended, and the time in ns at which the watchdog saw it.
        self._ticks: deque[tuple[int, int]] = deque([(0, time.time_ns())], self.ended.maxlen)
        # The collective that ``observe`` saw last, and the time at which it saw it first.
        self._seen = (0, 0.0)
        self._waits: dict[int, Wait] = {}
        recorder = recorder or Off()
        self.begins = CollectiveBegins(recorder, label)
        self._end, self._fail = recorder.end, recorder.fail
        self._creations = itertools.count(1)

    def enter(
        self,
        operation: str,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
    ) -> int:
        """Record the start of a collective; one of its tensors is referenced until ``leave``.

        Returns:
            The number of its entry in the recorder.
        """
        described = self.described = described_as(operation, inputs, outputs)
        self.sequence = sequence = self.sequence + 1
        self.operation = operation
        self.tensor = outputs[0] if outputs else inputs[0] if inputs else None
        return self.begins[described](sequence)

    def leave(self, number: int = 0, is_failed: bool = False) -> None:
        """Record the end of the collective of an entry."""
        self.tensor = IDLE
        self.ended.append(self.described)
        if is_failed:
            self._fail(number)
        else:
            self._end(number)

    def note_own(self) -> None:
        """Count the next collective that this thread issues as mpidist's own."""
        self.own += 1
        self._own_sequence = self.sequence + len(self.queue) + 1

    def within(self, function: Callable[[], T]) -> T:
        """Call the function of the operation under way; what it issues on the group is not counted.

        Those collectives have numbers of their own, which follow the operation's.
        """
        sequence, own, is_own = self.sequence, self.own, self.sequence == self._own_sequence
        operation, described = self.operation, self.described
        outer = self._outer
        self._outer = outer or (sequence, own, operation, time.monotonic())
        try:
            return function()
        finally:
            self._outer = outer
            self.own = own + self.sequence - sequence
            self._own_sequence = self.sequence if is_own else 0
            self.operation, self.described = operation, described

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
        # A copy, not a list of the items: a garbage collection within it may let threads change
        # them.
        ages = [(now - wait.start, key) for key, wait in self._waits.copy().items() if key < 0]
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
        tensor, outer = self.tensor, self._outer
        if tensor is IDLE and outer is not None:
            # Between two of those that it issues: it goes on.
            number, own, name, start = outer
            seconds, queued = time.monotonic() - start, len(self.queue)
            now = Entry(self.group, self.key, number, name, None, None, seconds, queued, own)
        elif tensor is IDLE:
            now = self._entry(self.operation, None, None, self.sequence)
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
            is_idle, sequence, current = self.tensor is IDLE, self.sequence, self.described
            ended, ticks = list(self.ended), list(self._ticks)
            if (self.tensor is IDLE, self.sequence) == (is_idle, sequence):
                break
        over = sequence if is_idle else sequence - 1
        first = over - len(ended) + 1
        counts, times = [count for count, _ in ticks], [at for _, at in ticks]
        found = [
            Recorded(described, number, *_bounds(counts, times, number), is_over=True)
            for number, described in enumerate(ended, first)
        ]
        if not is_idle and self.ended.maxlen:
            begun_ns, _ = _bounds(counts, times, sequence)
            found.append(Recorded(current, sequence, begun_ns, None, is_over=False))
        return found

    def history(self) -> History:
        """Return the last collectives; without calls while they change, or one issues others.

        Called by any thread.
        """
        for _ in range(_ATTEMPTS):
            is_idle, sequence, current = self.tensor is IDLE, self.sequence, self.described
            ended = list(self.ended)[-_HISTORY:]
            if (self.tensor is IDLE, self.sequence) == (is_idle, sequence):
                break
        else:
            return History(sequence)
        # An operation that issues others ends behind them: their places are not their numbers.
        if self._outer is not None:
            return History(sequence)
        return History(sequence, tuple(map(_call, ended if is_idle else [*ended, current])))

    def _entry(
        self, operation: str, tensor: torch.Tensor | None, seconds: float | None, sequence: int
    ) -> Entry:
        shape = tuple(tensor.shape) if tensor is not None else None
        dtype = str(tensor.dtype) if tensor is not None else None
        own, is_own = (self.own, sequence == self._own_sequence) if sequence else (0, False)
        if sequence and (outer := self._outer) is not None:
            first, own, name, _ = outer
            own += sequence - first
            operation, is_own = f"{name}/{operation}", False
        return Entry(
            self.group, self.key, sequence, operation, shape, dtype, seconds, len(self.queue),
            own, is_own,
        )  # fmt: skip


def described_as(
    operation: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Described:
    """Return a collective without its tensors' memory."""
    read = _forms(inputs) if inputs else ()
    # The same tensors where they are reduced in place.
    written = read if outputs is inputs else _forms(outputs) if outputs else ()
    return operation, read, written


def _kept(environ: Mapping[str, str]) -> int:
    """Return the number of operations that a group keeps; 0 for none."""
    text = next((environ[name] for name in _ENV_KEPT if environ.get(name)), str(_KEPT))
    return max(int(text), 0) if text.strip().lstrip("-").isdigit() else _KEPT


def _forms(tensors: Sequence[torch.Tensor]) -> tuple[Form, ...]:
    if len(tensors) == 1:  # a comprehension takes three times as long
        (tensor,) = tensors
        return ((tensor.shape, tensor.dtype),)
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


def _call(described: Described) -> Call:
    operation, inputs, outputs = described
    forms = (*outputs, *inputs)
    if not forms:
        return Call(operation)
    shape, dtype = forms[0]
    return Call(operation, tuple(shape), str(dtype))


def _bounds(counts: Sequence[int], times: Sequence[int], sequence: int) -> tuple[int, int | None]:
    """Return the last time at which an operation had not begun, and the first after its end.

    Args:
        counts: Numbers of operations that had ended, ascending.
        times: The time of each, in ns.
        sequence: The operation's number.
    """
    before, after = bisect_right(counts, sequence - 1), bisect_left(counts, sequence)
    return times[before - 1] if before else 0, times[after] if after < len(times) else None
