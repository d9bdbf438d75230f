"""Folders of checkpoints: written as ``step-<n>.part``, synced, renamed to ``step-<n>``, pruned.

A reader sees the whole checkpoint or none: the manifest is written last, then the folder is
renamed. Nothing here communicates.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpidist import saved_file
from mpidist.checkpoint import digested_file, manifest
from mpidist.checkpoint.manifest import Entry, Manifest
from mpidist.errors import CheckpointError
from mpidist.file_errors import naming
from mpidist.folder_sync import sync_folder

# Longest wait for a path made on another node: NFS may show a node a folder as it was up to 30 s or
# 60 s ago (acdirmin, acdirmax of nfs(5)).
VISIBLE_WITHIN_S = 60.0

# Last words of an error of a damaged checkpoint.
ADVICE = "remove its folder to go on from the one before"

_NAME = re.compile(r"step-(\d+)(\.old)?")
_PART = re.compile(r"step-\d+\.part")
_OTHER_RUN = "if another run saves there, too, give each a folder of its own"


class Found(NamedTuple):
    """Folder of a checkpoint, complete or not."""

    step: int
    path: Path
    is_complete: bool


def absolute(folder: str | os.PathLike[str]) -> str:
    """Return the absolute path of a run's folder.

    Raises:
        FileNotFoundError: It is relative, and the process's working folder was removed.
    """
    try:
        return os.path.abspath(folder)
    except FileNotFoundError as error:
        text = "the working folder of this process was removed, and the path is relative"
        raise FileNotFoundError(error.errno, text, os.fspath(folder)) from None


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, or the folder if it is one; else None.

    Communicates nothing; call it on one rank if all ranks need the same answer.

    Raises:
        OSError: The folder cannot be read.
    """
    folder = Path(folder)
    if (folder / manifest.NAME).is_file():
        return folder
    return next((found.path for found in listed(folder) if found.is_complete), None)


def listed(folder: Path) -> list[Found]:
    """Return the checkpoints of a folder, newest first, without parts being written."""
    if not folder.exists():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            # A former checkpoint (.old) counts if its successor of the same step is missing.
            found.append(
                (
                    int(match[1]),
                    match[2] is None,
                    Found(int(match[1]), path, (path / manifest.NAME).is_file()),
                )
            )
    return [checkpoint for _, _, checkpoint in sorted(found, key=lambda row: row[:2], reverse=True)]


def choose(folder: Path) -> tuple[str, str] | None:
    """Return path and manifest text of the checkpoint to load: the newest complete one, or None.

    Warns of newer folders without a manifest, which unfinished saves have left.

    Raises:
        CheckpointError: Its manifest is damaged, or one of its files is missing.
        OSError: The folder or the manifest cannot be read.
    """
    path = latest(folder)
    for found in listed(folder):
        if found.path == path:
            break
        if not found.is_complete:
            then = "is passed over" if path is None else f"is passed over for {path.name}"
            warnings.warn(
                f"{found.path} has no {manifest.NAME}: its save was cut short, and it {then}",
                stacklevel=4,
            )
    if path is None:
        return None
    try:
        text = manifest.read(path)
        described = manifest.from_json(text)
    except ValueError as error:
        raise CheckpointError(
            f"{path.name}: {error}; without its folder the one before is taken"
        ) from error
    # A file that rank 0 misses is missing for all; the other ranks need not wait for it.
    absent = [name for name in described.files if not (path / name).is_file()]
    if absent:
        raise CheckpointError(f"{path.name} is incomplete: {', '.join(absent)} missing; {ADVICE}")
    return str(path), text


def begin(folder: Path, step: int) -> Path:
    """Make the folder for a checkpoint's files, on one rank; remove parts of killed runs.

    Raises:
        CheckpointError: The folder holds a checkpoint of a later step.
        OSError: The folder cannot be written.
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
    """Wait until a path made on another node is visible on this one.

    Args:
        path: The path.
        within: Its folder, made on this node; without that folder the path cannot appear.

    Raises:
        CheckpointError: The path is not visible in time, or its folder was removed.
    """
    deadline, pause_s = time.monotonic() + VISIBLE_WITHIN_S, 0.01
    while not path.exists():
        if within is not None and not within.exists():
            raise CheckpointError(f"{within} was removed while it was written; {_OTHER_RUN}")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path} is not seen on {socket.gethostname()}, {VISIBLE_WITHIN_S:g} s after "
                "rank 0 saw it: checkpoints need a folder that all nodes share"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def problems(path: Path, expected: dict[str, Entry]) -> list[str]:
    """Return one text for each missing or damaged file of a checkpoint; links count as missing."""
    # A link would make this process read a file elsewhere.
    sizes = {
        name: (path / name).stat().st_size if saved_file.is_regular(path / name) else None
        for name in expected
    }
    digests = {
        name: digested_file.digest(path / name, entry.digest)
        for name, entry in expected.items()
        if sizes[name] == entry.bytes
    }
    return manifest.problems(expected, sizes, digests)


def commit(part: Path, written: Manifest) -> Path:
    """Write the manifest and rename the folder, on one rank, after all have written their files.

    Args:
        part: The folder being written.
        written: Manifest with the files of all ranks.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: A file is missing, or its size differs from the manifest's.
        OSError: The manifest cannot be written, or the folder cannot be renamed.
    """
    for name in written.files:
        wait_for(part / name, part)
    sizes = {name: (part / name).stat().st_size for name in written.files}
    wrong = [
        f"{name} has {sizes[name]} bytes, not {entry.bytes}"
        for name, entry in written.files.items()
        if sizes[name] != entry.bytes
    ]
    if wrong:
        raise CheckpointError(
            f"files are not as they were written: {', '.join(wrong)}; {_OTHER_RUN}"
        )
    path = part / manifest.NAME
    with naming(path), open(path, "w", encoding="utf-8") as file:
        file.write(manifest.to_json(written))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(part)
    final = part.with_suffix("")
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        # A checkpoint of the same step exists: kept as .old until the new one has its name.
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    part.rename(final)
    sync_folder(final.parent)
    return final


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to ``step``, and incomplete ones before.

    Raises:
        OSError: A checkpoint cannot be removed.
    """
    current = folder / f"step-{step}"
    older = [found for found in listed(folder) if found.step <= step and found.path != current]
    kept = [found for found in older if found.is_complete and found.step < step][: keep - 1]
    for found in older:
        if found not in kept:
            # The manifest goes first: a folder that is half removed is no checkpoint.
            (found.path / manifest.NAME).unlink(missing_ok=True)
            shutil.rmtree(found.path)


def discard(part: Path) -> None:
    """Remove the files of a failed save; errors are ignored."""
    shutil.rmtree(part, ignore_errors=True)


def share_of(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return one rank's share of the checks of files that all ranks read (pure)."""
    return sorted(names)[rank::world_size]
