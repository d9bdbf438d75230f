"""Table of pending calls by sequence number, and the earliest deadline among them."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpidist.rpc.call import Call

_NEVER = float("inf")


class PendingCalls:
    """Calls by sequence number. Thread-safe: the thread that removes a call completes it."""

    def __init__(self) -> None:
        self._pending: dict[int, Call] = {}
        self._next_deadline = _NEVER

    def __len__(self) -> int:
        return len(self._pending)

    def creations(self) -> int:
        """Return the number of calls of ``remote`` that the owner has not answered."""
        return sum(call.is_creation for call in list(self._pending.values()))

    def has_expired(self) -> bool:
        """Return whether a deadline may have passed."""
        return self._next_deadline != _NEVER and time.monotonic() >= self._next_deadline

    def _remove_where(self, concerns: Callable[[Call], bool]) -> list[Call]:
        """Remove and return the calls for which ``concerns`` returns True."""
        matching = [call for call in list(self._pending.values()) if concerns(call)]
        return [call for call in matching if self._pending.pop(call.sequence, None) is not None]

    def _remove_expired(self) -> list[Call]:
        # Reset before the search, so that a call that is added meanwhile can lower it again.
        self._next_deadline = _NEVER
        now = time.monotonic()
        late = self._remove_where(lambda call: call.deadline <= now)
        nearest = min((call.deadline for call in list(self._pending.values())), default=_NEVER)
        self._next_deadline = min(self._next_deadline, nearest)
        return late
