"""Cache of measurements for later jobs: small JSON files, one for each key, in the user's folder.

Nothing that another user could have written is read. Folder and file must belong to this user or to
root, who may keep measurements for all users, and must not be writable by others. The open file
descriptor is checked, so that no other file can replace the one checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_FORMAT = 1  # version of the files' content
_MAX_BYTES = 1 << 20  # of a file; the library's own have a few KiB
_OPEN = os.O_CLOEXEC | os.O_NONBLOCK  # opening a named pipe must not block

_log = logging.getLogger(__name__)
_warned: set[str] = set()  # warnings that this process has logged


def folder() -> Path:
    """Return ``$MPIDIST_CACHE``, ``$XDG_CACHE_HOME/mpidist`` or ``~/.cache/mpidist``.

    The first whose variable is set; the folder need not exist.

    Raises:
        RuntimeError: Neither variable is set and this user has no home.
    """
    own = os.environ.get("MPIDIST_CACHE")
    if own:
        return Path(own)
    caches = os.environ.get("XDG_CACHE_HOME")
    return Path(caches) / "mpidist" if caches else Path.home() / ".cache" / "mpidist"


def load(kind: str, key: Mapping[str, object]) -> Any:
    """Return the value stored under this key, or None if there is none or it is not trusted.

    The value consists of JSON's types; the caller checks its content. A file or folder that another
    user may write is ignored, with one warning.

    Args:
        kind: Begins the file's name.
        key: Everything that the value depends on; strings and numbers.
    """
    # The file may be anything: truncated, of another version, a folder, a link.
    try:
        with _opened(folder()) as place:
            handle = os.open(_name(kind, key), os.O_RDONLY | os.O_NOFOLLOW | _OPEN, dir_fd=place)
            with open(handle, "rb") as file:
                _require_own(handle, folder() / _name(kind, key), stat.S_ISREG)
                text = file.read(_MAX_BYTES + 1)
        held = json.loads(text.decode()) if len(text) <= _MAX_BYTES else {}
        return held["value"] if held["format"] == _FORMAT and held["key"] == dict(key) else None
    except _UnsafeError as problem:
        _warn(str(problem))
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        pass
    return None


def store(kind: str, key: Mapping[str, object], value: object) -> bool:
    """Write a value that ``load`` returns in later jobs; return whether that succeeded.

    The file is renamed when complete, so a reader sees the old file or the new one, never a part.
    Missing folders are created for this user alone, and so is the file.
    """
    text = json.dumps({"format": _FORMAT, "key": dict(key), "value": value}, indent=1)
    try:
        _make(folder())
        with _opened(folder()) as place:
            name = _name(kind, key)
            part = f"{name}.{uuid.uuid4().hex}.part"
            handle = os.open(
                part,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _OPEN,
                0o600,
                dir_fd=place,
            )
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(part, name, src_dir_fd=place, dst_dir_fd=place)
                return True
            except OSError:
                os.unlink(part, dir_fd=place)
    except _UnsafeError as problem:
        _warn(str(problem))
    except (OSError, RuntimeError):
        pass
    return False


class _UnsafeError(Exception):
    """Another user may write the open file."""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a folder, following links, and require that no other user may write it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        _require_own(handle, path, stat.S_ISDIR)
        yield handle
    finally:
        os.close(handle)


def _require_own(handle: int, path: Path, is_kind: Callable[[int], bool]) -> None:
    status = os.fstat(handle)
    if not is_kind(status.st_mode):
        raise OSError(f"{path} is something else")
    if status.st_uid not in (os.geteuid(), 0):
        raise _UnsafeError(
            f"{path} belongs to user {status.st_uid} and is ignored, as what is found there could "
            "be forged: remove it, or set MPIDIST_CACHE to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _UnsafeError(
            f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):03o}) and "
            "is ignored, as what is found there could be forged: "
            f"chmod go-w {path}, or set MPIDIST_CACHE to a folder of your own"
        )


def _make(path: Path) -> None:
    for part in (*reversed(path.parents), path):
        # Another rank may create the same folder at this moment.
        with contextlib.suppress(FileExistsError):
            if not part.is_dir():
                part.mkdir(0o700)


def _warn(text: str) -> None:
    # ``warnings.warn`` may raise, on this rank alone, and the other ranks would wait.
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def _name(kind: str, key: Mapping[str, object]) -> str:
    text = json.dumps(dict(key), sort_keys=True)
    return f"{kind}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
