"""Which functions have been quick: the thread that polls may run them by itself."""

from __future__ import annotations

from typing import Any

QUICK_S = 5e-4  # what the others' messages can wait for
_DECAY = 0.75
_MOST = 4096  # names; a job that makes up more than these starts again


class Quickness:
    """How long functions took, by name. Any thread may use it: what is lost in a race is one measurement."""

    def __init__(self) -> None:
        self._seconds: dict[Any, float] = {}

    def is_quick(self, key: Any) -> bool:
        """Say whether a function has been run, and took less than ``QUICK_S`` of late."""
        return self._seconds.get(key, QUICK_S) < QUICK_S

    def note(self, key: Any, seconds: float) -> None:
        """Note how long a run took. A long one counts at once, and is forgotten over many short ones."""
        before = self._seconds.get(key)
        if before is None and len(self._seconds) >= _MOST:
            self._seconds.clear()
        self._seconds[key] = seconds if before is None else max(seconds, _DECAY * before + (1 - _DECAY) * seconds)


def key_of(function: Any, args: Any) -> Any:
    """Return what a function is known by; a method that is called by way of a reference, by its own name."""
    name = getattr(function, "__qualname__", None)
    if name == "call_method" and args:
        return args[1]
    return (function.__module__, name) if name is not None else type(function)
