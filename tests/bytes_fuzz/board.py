"""Shared memory with the current case, between the reading process and the one that watches it."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

_HEAD = struct.Struct("<QQI")  # number of the case, target, bytes
_ROOM = 1 << 20


class Case(NamedTuple):
    """The current case.

    Attributes:
        number: Counted over all targets.
        target: Index of the target among those that are run.
        data: Its bytes.
    """

    number: int
    target: int
    data: bytes


class Board:
    """A file mapped by both processes.

    Args:
        path: Of the file; a new one if None.
    """

    def __init__(self, path: str | None = None) -> None:
        if path is None:
            descriptor, path = tempfile.mkstemp(prefix="bytes-fuzz-")
            os.ftruncate(descriptor, _ROOM)
        else:
            descriptor = os.open(path, os.O_RDWR)
        self.path = path
        self._map = mmap.mmap(descriptor, _ROOM)
        os.close(descriptor)

    def write(self, number: int, target: int, data: bytes) -> None:
        """Record the case that is about to be read."""
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, 0, number, target, len(data))

    def number(self) -> int:
        """Return the number of the current case."""
        found: int = _HEAD.unpack_from(self._map)[0]
        return found

    def read(self) -> Case:
        """Return the current case."""
        number, target, length = _HEAD.unpack_from(self._map)
        return Case(number, target, bytes(self._map[_HEAD.size : _HEAD.size + length]))

    def remove(self) -> None:
        """Remove the file."""
        os.unlink(self.path)
