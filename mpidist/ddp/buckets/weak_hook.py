"""Hook of autograd that does not keep its owner.

Parameters and autograd's nodes outlive the object that has registered a hook with them, and
Python's garbage collector does not see the references of their hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


def weak_hook(owner: T, method: Callable[[T, K, V], None]) -> Callable[[K, V], None]:
    """Return a function that calls ``method(owner, key, value)`` as long as the owner lives."""
    reference = weakref.ref(owner)

    def call(key: K, value: V) -> None:
        living = reference()
        if living is not None:
            method(living, key, value)

    return call
