"""Forked children of a rank, which inherit what is their parent's: locks, pipes, files, stores."""

from __future__ import annotations

import os
from typing import Protocol

from mpidist.weak_registry import WeakRegistry


class Inherited(Protocol):
    """What a child must not use as its own."""

    def leave_to_parent(self) -> None:
        """Give it up in the child; the parent's stays as it is."""


_inherited: WeakRegistry[Inherited] = WeakRegistry()


def register(owner: Inherited) -> None:
    """Have each forked child call ``owner.leave_to_parent()``, before any other code of Python.

    Args:
        owner: Held by a weak reference; may be registered again.
    """
    _inherited.add(owner)


def _leave_all() -> None:
    for owner in _inherited.alive():
        owner.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
