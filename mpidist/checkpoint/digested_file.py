"""SHA-256 digests of a checkpoint's files, computed as ``torch.save`` writes them or by reading."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch

from mpidist.checkpoint.manifest import Entry

_CHUNK_BYTES = 1 << 20


def write(path: Path, value: object) -> Entry:
    """Write a value with ``torch.save``, and sync it; return the file's size and digest."""
    with open(path, "wb") as file:
        digesting = _Digesting(file)
        try:
            torch.save(value, cast("IO[bytes]", digesting))
        except Exception:
            # torch raises an error of its archive, which reads like a damaged file; the disk's own
            # error gives the cause.
            if digesting.problem is not None:
                raise digesting.problem from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return Entry(digesting.bytes, digesting.digest.hexdigest())


def sync(path: Path) -> Entry:
    """Sync a file written by other code; return its size and digest."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return Entry(path.stat().st_size, digest(path))


def digest(path: Path) -> str:
    """Return the sha256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


class _Digesting:
    """File that counts and hashes the bytes written to it.

    Attributes:
        problem: The first error of the underlying file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.problem: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.problem is not None:
            raise self.problem
        try:
            self._file.write(data)
        except OSError as error:
            self.problem = error
            raise
        size = memoryview(data).nbytes
        self.bytes += size
        self.digest.update(data)
        return size

    def flush(self) -> None:
        self._file.flush()
