"""The calls of a worker that wait for their answers, and when the first of them times out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from mpidist.rpc.call import Call

_NEVER = float("inf")


class PendingCalls:
    """Calls by number. Thread-safe: whoever takes a call out completes it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._next_deadline = _NEVER

    def __len__(self) -> int:
        return len(self._calls)

    def next_sequence(self) -> int:
        """Return a number that no other call has."""
        return next(self._numbers)

    def add(self, call: Call) -> None:
        """Note a call, before its request is sent."""
        self._calls[call.sequence] = call
        if call.deadline < self._next_deadline:
            self._next_deadline = call.deadline

    def pop(self, sequence: int) -> Call | None:
        """Take a call out; None if somebody has."""
        return self._calls.pop(sequence, None)

    def taken(self, concerns: Callable[[Call], bool]) -> list[Call]:
        """Take out those calls that ``concerns`` says yes to."""
        found = [call for call in list(self._calls.values()) if concerns(call)]
        return [call for call in found if self.pop(call.sequence) is not None]

    def has_expired(self) -> bool:
        """Say whether it is time to look for calls that are too late."""
        return self._next_deadline != _NEVER and time.monotonic() >= self._next_deadline

    def expired(self) -> list[Call]:
        """Take out the calls that are too late."""
        # Before looking: a call that is added meanwhile sets it again, if it must.
        self._next_deadline = _NEVER
        now = time.monotonic()
        late = self.taken(lambda call: call.deadline <= now)
        nearest = min((call.deadline for call in list(self._calls.values())), default=_NEVER)
        self._next_deadline = min(self._next_deadline, nearest)
        return late
