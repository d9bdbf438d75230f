"""Registries of objects by weak references, which threads list while others add."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Objects by weak references, in the order in which they were added.

    Any thread may add and list them. Iterating a ``WeakSet`` raises RuntimeError where another
    thread adds an object meanwhile: the watchdogs list groups that other threads make.
    """

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[T, None] = WeakKeyDictionary()

    def add(self, entry: T) -> None:
        """Add an object, which is compared by identity or as its class does."""
        self._entries[entry] = None

    def discard(self, entry: T) -> None:
        """Remove an object, if it is there."""
        self._entries.pop(entry, None)

    def alive(self) -> list[T]:
        """Return the objects that still exist."""
        # keyrefs() copies the keys without executing Python, so no other thread runs within it.
        references = self._entries.keyrefs()
        return [entry for reference in references if (entry := reference()) is not None]
