"""Board between the process that reads hostile bytes and the one that watches it: the case under way, in shared memory."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

_HEAD = struct.Struct("<QQI")  # number of the case, target, bytes
_ROOM = 1 << 20


class Case(NamedTuple):
    """The case under way.

    Attributes:
        number: Its number, over all targets.
        target: The target's place among those that are run.
        data: Its bytes.
    """

    number: int
    target: int
    data: bytes


class Board:
    """Memory of a file that both map.

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
        """Note the case that is about to be read."""
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, 0, number, target, len(data))

    def number(self) -> int:
        """Return the number of the case under way."""
        found: int = _HEAD.unpack_from(self._map)[0]
        return found

    def read(self) -> Case:
        """Return the case under way."""
        number, target, length = _HEAD.unpack_from(self._map)
        return Case(number, target, bytes(self._map[_HEAD.size : _HEAD.size + length]))

    def remove(self) -> None:
        """Remove the file."""
        os.unlink(self.path)
