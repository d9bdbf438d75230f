"""Folders of checkpoints: written as ``step-<n>.part``, renamed to ``step-<n>`` once all is on the disk, removed in their turn.

A reader sees a checkpoint whole or not at all: the manifest is written last, then the folder
renamed. Nothing here communicates.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch

from mpidist import saved_file
from mpidist.checkpoint import manifest
from mpidist.checkpoint.manifest import Entry, Manifest
from mpidist.errors import CheckpointError

# Between the nodes of a cluster: NFS may show a node a folder as it was up to 30 s or 60 s ago
# (acdirmin, acdirmax of nfs(5)).
PATIENCE_S = 60.0

_NAME = re.compile(r"step-(\d+)(\.old)?")
_PART = re.compile(r"step-\d+\.part")
_CHUNK_BYTES = 1 << 20
_OTHER_RUN = "if another run saves there, too, give each a folder of its own"


class Found(NamedTuple):
    """A folder that holds a checkpoint, or a part of one."""

    step: int
    path: Path
    is_complete: bool


def read_manifest(path: Path) -> str:
    """Return the text of a checkpoint's manifest.

    Raises:
        ValueError: It is longer than any manifest.
        OSError: It cannot be read.
    """
    handle = os.open(
        path / manifest.NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    )
    with open(handle, "rb") as file:
        text = file.read(manifest.MOST_BYTES + 1)
    if len(text) > manifest.MOST_BYTES:
        raise ValueError(f"{manifest.NAME} has more than {manifest.MOST_BYTES} bytes")
    return text.decode("utf-8", errors="replace")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, or the folder itself if it is one; None if there is none.

    Communicates nothing: where ranks are to agree, ask on one.

    Raises:
        OSError: The folder cannot be read.
    """
    folder = Path(folder)
    if (folder / manifest.NAME).is_file():
        return folder
    return next((found.path for found in listed(folder) if found.is_complete), None)


def listed(folder: Path) -> list[Found]:
    """Return the checkpoints of a folder, the newest first, without those that are being written."""
    if not folder.exists():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            # One that was set aside for another of the same step counts if that never came.
            found.append(
                (
                    int(match[1]),
                    match[2] is None,
                    Found(int(match[1]), path, (path / manifest.NAME).is_file()),
                )
            )
    return [held for _, _, held in sorted(found, key=lambda row: row[:2], reverse=True)]


def begin(folder: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written into, on one rank; what dead runs left is removed.

    Raises:
        CheckpointError: The folder holds a checkpoint of a later step.
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    later = [found.path.name for found in listed(folder) if found.is_complete and found.step > step]
    if later:
        raise CheckpointError(
            f"{folder} holds {', '.join(later)}, of a later step than {step}, which the next start "
            "would take: remove what is "
            "not to be used, or give each run a folder of its own"
        )
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            shutil.rmtree(path)
    part = folder / f"step-{step}.part"
    part.mkdir()
    return part


def wait_for(path: Path, within: Path | None = None) -> None:
    """Wait until a path that another node has made is seen on this one.

    Args:
        path: To be seen.
        within: Folder that this node has made for it; without it nothing can come.

    Raises:
        CheckpointError: It is not seen in time.
    """
    deadline, pause_s = time.monotonic() + PATIENCE_S, 0.01
    while not path.exists():
        if within is not None and not within.exists():
            raise CheckpointError(f"{within} was removed while it was written; {_OTHER_RUN}")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} is not seen on {socket.gethostname()}, {PATIENCE_S:g} s after rank 0 saw "
                "it: checkpoints need a folder "
                "that all nodes share"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def write(path: Path, value: Any) -> Entry:
    """Write a value with ``torch.save``, bring it to the disk, and return its size and digest."""
    with open(path, "wb") as file:
        digesting = _Digesting(file)
        try:
            torch.save(value, cast("IO[bytes]", digesting))
        except Exception as error:
            # torch then speaks of its own archive; the disk's error says what to do.
            if digesting.problem is not None:
                raise digesting.problem from error
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


def problems(path: Path, expected: dict[str, Entry]) -> list[str]:
    """Say which files of a checkpoint are missing or damaged, one text each; a link is taken for missing."""
    # A link would have this process read, and compare, a file elsewhere.
    sizes = {
        name: (path / name).stat().st_size if saved_file.is_regular(path / name) else None
        for name in expected
    }
    digests = {
        name: digest(path / name) for name, entry in expected.items() if sizes[name] == entry.bytes
    }
    return manifest.problems(expected, sizes, digests)


def commit(part: Path, told: Manifest) -> Path:
    """Complete a checkpoint, on one rank, once all have written their files; return its folder.

    Raises:
        CheckpointError: A file is missing, or has another size than its writer told.
        OSError: The manifest cannot be written, the folder not be renamed.
    """
    for name in told.files:
        wait_for(part / name, part)
    sizes = {name: (part / name).stat().st_size for name in told.files}
    wrong = [
        f"{name} has {sizes[name]} bytes, not {entry.bytes}"
        for name, entry in told.files.items()
        if sizes[name] != entry.bytes
    ]
    if wrong:
        raise CheckpointError(
            f"files are not as they were written: {', '.join(wrong)}; {_OTHER_RUN}"
        )
    with open(part / manifest.NAME, "w", encoding="utf-8") as file:
        file.write(manifest.to_json(told))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(part)
    final = part.with_suffix("")
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        # Saved before at the same step: set aside, so that one of the two is there at any moment.
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    part.rename(final)
    _sync_folder(final.parent)
    return final


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to ``step``, and what is left of others before it.

    Raises:
        OSError: One cannot be removed.
    """
    current = folder / f"step-{step}"
    older = [found for found in listed(folder) if found.step <= step and found.path != current]
    kept = [found for found in older if found.is_complete and found.step < step][: keep - 1]
    for found in older:
        if found not in kept:
            # First the manifest: a folder that is half removed is no checkpoint.
            (found.path / manifest.NAME).unlink(missing_ok=True)
            shutil.rmtree(found.path)


def discard(part: Path) -> None:
    """Remove what a save that failed has written, as far as that goes."""
    shutil.rmtree(part, ignore_errors=True)


def share_of(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return those of some files that one rank checks where all ranks read all (pure)."""
    return sorted(names)[rank::world_size]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot, and order renames by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class _Digesting:
    """A file that counts and digests what is written to it.

    Attributes:
        problem: The first error of the file below.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
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
