"""Locks of parameters: optimizers that share a parameter step in turn, others concurrently."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_registering = threading.Lock()
_serials = itertools.count()
_locks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter


class SerialLock:
    """Lock with a serial number; locks are acquired in the order of these numbers."""

    __slots__ = ("lock", "serial")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.serial = next(_serials)


class ParameterLocks:
    """Locks of one optimizer's parameters.

    A parameter gets its lock with its first optimizer. All parameters that are new with an
    optimizer share one new lock, so an optimizer usually has a single lock.
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

        Blocks: until steps in progress have ended. The order of serial numbers prevents deadlock.
        """
        for lock in self._held:
            lock.lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Release the locks."""
        for lock in self._held:
            lock.lock.release()
