"""Table of calls that wait for their answers, by number, and the first deadline among them."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpidist.rpc.call import Call

_NEVER = float("inf")


class PendingCalls:
    """Calls by number. Thread-safe: whoever takes a call out completes it."""

    def __init__(self) -> None:
        self._pending: dict[int, Call] = {}
        self._next_deadline = _NEVER

    def __len__(self) -> int:
        return len(self._pending)

    def creations(self) -> int:
        """Return the number of calls of ``remote`` that the owner has not answered."""
        return sum(call.is_creation for call in list(self._pending.values()))

    def has_expired(self) -> bool:
        """Say whether it is time to look for calls that are too late."""
        return self._next_deadline != _NEVER and time.monotonic() >= self._next_deadline

    def _remove_where(self, concerns: Callable[[Call], bool]) -> list[Call]:
        """Take out those calls for which ``concerns`` returns True."""
        found = [call for call in list(self._pending.values()) if concerns(call)]
        return [call for call in found if self._pending.pop(call.sequence, None) is not None]

    def _remove_expired(self) -> list[Call]:
        # Before looking: a call that is added meanwhile sets it again, if it must.
        self._next_deadline = _NEVER
        now = time.monotonic()
        late = self._remove_where(lambda call: call.deadline <= now)
        nearest = min((call.deadline for call in list(self._pending.values())), default=_NEVER)
        self._next_deadline = min(self._next_deadline, nearest)
        return late
