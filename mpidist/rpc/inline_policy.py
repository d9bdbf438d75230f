"""Running time per function, to decide which requests run inline on the polling thread."""

from __future__ import annotations

QUICK_S = 5e-4  # the time for which an inline request may delay other messages
_DECAY = 0.75
_MAX_KEYS = 4096  # a full table is cleared


class InlinePolicy:
    """Running times in seconds, by function. Not locked: a race loses one measurement."""

    def __init__(self) -> None:
        self._seconds: dict[object, float] = {}

    def is_quick(self, key: object) -> bool:
        """Return whether a function has run, and recently took less than ``QUICK_S``."""
        return self._seconds.get(key, QUICK_S) < QUICK_S

    def record(self, key: object, seconds: float) -> None:
        """Record the running time of one run.

        A long run takes effect at once; its effect decays with short runs.
        """
        before = self._seconds.get(key)
        if before is None:
            if len(self._seconds) >= _MAX_KEYS:
                self._seconds.clear()
            self._seconds[key] = seconds
        elif seconds > before or before > QUICK_S / 10:
            self._seconds[key] = max(seconds, _DECAY * before + (1 - _DECAY) * seconds)
