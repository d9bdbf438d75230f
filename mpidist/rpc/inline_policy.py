"""Running time per function, to decide which requests run inline on the polling thread."""

from __future__ import annotations

from typing import Any

QUICK_S = 5e-4  # other workers' messages wait so long at most
_DECAY = 0.75
_MOST = 4096  # names; a job that makes up more than these starts again


class InlinePolicy:
    """Seconds that functions took, by name. Any thread may use it: a race loses one measurement."""

    def __init__(self) -> None:
        self._seconds: dict[Any, float] = {}

    def is_quick(self, key: Any) -> bool:
        """Say whether a function has been run, and took less than ``QUICK_S`` of late."""
        return self._seconds.get(key, QUICK_S) < QUICK_S

    def record(self, key: Any, seconds: float) -> None:
        """Note how long a run took.

        A long one counts at once, and is forgotten over many short ones.
        """
        before = self._seconds.get(key)
        if before is None:
            if len(self._seconds) >= _MOST:
                self._seconds.clear()
            self._seconds[key] = seconds
        elif seconds > before or before > QUICK_S / 10:
            self._seconds[key] = max(seconds, _DECAY * before + (1 - _DECAY) * seconds)
