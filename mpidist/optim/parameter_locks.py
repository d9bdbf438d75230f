"""Locks of parameters: optimizers that share one step in turn, all others at the same time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_registering = threading.Lock()
_serials = itertools.count()
_locks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter, as long as it lives


class SerialLock:
    """Mutual exclusion with a place in the order in which locks are acquired."""

    __slots__ = ("lock", "serial")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.serial = next(_serials)


class ParameterLocks:
    """The locks of one optimizer's parameters.

    A parameter belongs to one lock from its first optimizer on. The parameters that are new with an
    optimizer share one new lock, so that an optimizer usually has a single one.
    """

    def __init__(self) -> None:
        self._held: tuple[SerialLock, ...] = ()

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Guard more parameters. Must not run during a step of the same optimizer."""
        found = set(self._held)
        with _registering:
            new = SerialLock()
            for parameter in parameters:
                lock = _locks.get(parameter)
                if lock is None:
                    lock = _locks[parameter] = new
                found.add(lock)
        self._held = tuple(sorted(found, key=lambda lock: lock.serial))

    def __enter__(self) -> None:
        """Exclude the steps of all optimizers that share one of these parameters.

        Blocks: until those under way have ended. All acquire by serial number, so that none waits
        in a circle.
        """
        for lock in self._held:
            lock.lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Admit them again."""
        for lock in self._held:
            lock.lock.release()
