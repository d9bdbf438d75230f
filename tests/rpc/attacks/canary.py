"""Canary: functions that no list admits; a payload that runs code calls them."""

from __future__ import annotations

from typing import Any

fired: list[str] = []


def fire(*args: Any, **kwargs: Any) -> str:
    """Record that code outside of the list has run."""
    fired.append(repr(args))
    return "fired"


class Bird:
    """An unlisted class: all that runs on it is noted."""

    def __init__(self, *args: Any) -> None:
        fire("Bird.__init__")

    @property
    def song(self) -> str:
        """Note that a property ran."""
        return fire("Bird.song")

    def sing(self) -> str:
        """Note that a method ran."""
        return fire("Bird.sing")

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return fire(f"Bird.__getattr__({name})")


def silent_bird() -> Bird:
    """Return an instance without running its constructor."""
    return Bird.__new__(Bird)


class Nest:
    """An unlisted class from which a listed one inherits."""

    def inherited(self) -> str:
        """Note that a method ran that the listed class does not define."""
        return fire("Nest.inherited")
