"""Digests of a checkpoint's files, computed as ``torch.save`` writes them or by reading.

SHA-256 of files on a disk, a 64-bit sum of files in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from torch.serialization import get_crc32_options, set_crc32_options

from mpidist import saved_file
from mpidist.checkpoint.manifest import Entry, digest_name
from mpidist.comm.mpi import job_folder
from mpidist.file_errors import naming
from mpidist.saved_file import Writable

_CHUNK_BYTES = 1 << 20
_WORD_BYTES = 8


def write(path: Path, value: object) -> Entry:
    """Write a value with ``torch.save``, and sync it; return the file's size and SHA-256."""
    with naming(path), open(path, "wb") as file:
        entry = _saved(value, file, hashlib.sha256())
        os.fsync(file.fileno())
    return entry


def overwrite(path: Path, value: object) -> Entry:
    """Write a value over a file in memory; return the file's size and 64-bit sum.

    Memory that the file has is used again, which takes half the time that fresh memory takes. The
    sum takes a tenth of a SHA-256's time.

    Raises:
        OSError: The memory is full, but for what MPI may need.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with (
        naming(path),
        open(os.open(path, flags, 0o600), "wb") as file,
        _without_crc32_of_records(),
    ):
        entry = _saved(value, _LeavingRoom(file), Sum64())
        # What the file held before may have been longer; a device has no length.
        if os.fstat(file.fileno()).st_size > entry.bytes:
            file.truncate(entry.bytes)
    return entry


@contextlib.contextmanager
def _without_crc32_of_records() -> Iterator[None]:
    """Have ``torch.save`` compute no checksums of its own, which no reader compares."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _saved(value: object, file: Writable, digest: _Digest) -> Entry:
    digesting = _Digesting(file, digest)
    saved_file.write(value, digesting)
    return Entry(digesting.bytes, digest.hexdigest())


def digest(path: Path, like: str = "") -> str:
    """Return the digest of a file.

    Args:
        like: A digest of the same algorithm; SHA-256 if empty.
    """
    total: _Digest = Sum64() if digest_name(like) == "sum64" else hashlib.sha256()
    with naming(path), open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


class _Digest(Protocol):
    """Digest of bytes that come in parts: ``hashlib``'s, or a sum."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Sum64:
    """Sum of the 64-bit words of bytes, the last one filled with zeros, with a digest's methods."""

    def __init__(self) -> None:
        self._value = 0
        self._rest = b""  # fewer bytes than a word

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes, which follow those before."""
        octets = memoryview(data).cast("B")
        if self._rest:
            missing = _WORD_BYTES - len(self._rest)
            self._rest += octets[:missing]
            if len(self._rest) < _WORD_BYTES:
                return
            self._value += int.from_bytes(self._rest, "little")
            octets = octets[missing:]
        end = len(octets) - len(octets) % _WORD_BYTES
        self._value += int(np.frombuffer(octets[:end], "<u8").sum())
        self._rest = bytes(octets[end:])

    def hexdigest(self) -> str:
        """Return the sum modulo 2⁶⁴, as 16 digits."""
        return f"{(self._value + int.from_bytes(self._rest, 'little')) % 2**64:016x}"


class _Digesting:
    """File that counts and hashes the bytes written to it."""

    def __init__(self, file: Writable, digest: _Digest) -> None:
        self._file = file
        self._digest = digest
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        size = memoryview(data).nbytes
        self.bytes += size
        self._digest.update(data)
        return size

    def flush(self) -> None:
        self._file.flush()


class _LeavingRoom:
    """File in a node's memory that is written over, and grows while there is room.

    It is written in chunks, because other ranks write to the memory, too.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._has_bytes = os.fstat(file.fileno()).st_size
        self._offset = 0

    def write(self, data: bytes | memoryview) -> int:
        octets = memoryview(data).cast("B")
        for start in range(0, len(octets), _CHUNK_BYTES):
            chunk = octets[start : start + _CHUNK_BYTES]
            self._offset += len(chunk)
            if self._offset > self._has_bytes:
                job_folder.require_room(self._file.fileno(), len(chunk))
            self._file.write(chunk)
        return len(octets)

    def flush(self) -> None:
        self._file.flush()
