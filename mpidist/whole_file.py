"""Replacement of a file as a whole: a reader sees the old content or the new, never a part.

The content is written to a file of its own name in the same folder, which nobody else can have made
before (``O_EXCL``, ``O_NOFOLLOW``), and renamed when it is complete. Where others may write the
folder, a link that they plant is therefore not followed, and two writers do not mix.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mpidist.file_errors import naming

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 1 << 16
_SPECIAL = "A device or a pipe, which no file can replace"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Return a binary file that takes the name ``path`` at the end of the context.

    An exception within the context removes the file, and ``path`` stays as it was.

    Args:
        path: Of the file; a link of this name is replaced itself. A device, a pipe, and a link to
            one, are refused: root could replace ``/dev/null``.

    Raises:
        OSError: The file cannot be written.
    """
    if _is_special(path):
        raise OSError(errno.EINVAL, _SPECIAL, os.fspath(path))
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        handle = os.open(part, _FLAGS, 0o666)
    except FileExistsError:
        raise  # somebody has guessed the name of the part
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        with naming(path), open(handle, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def problem_of(path: Path) -> str:
    """Return why a file could not be written; empty if it could.

    A folder that may not be written, a full disk: for what is written at the end of a long work,
    and is to be known at its begin.
    """
    if path.is_dir():
        return f"{path} is a folder"
    if _is_special(path):
        return f"{path}: {_SPECIAL}"
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(_BLOCK_BYTES))
            file.flush()
            return ""
    except OSError as error:
        return f"{path.parent}: {error.strerror or error}"


def _is_special(path: Path) -> bool:
    """Return whether a path leads to a device, a pipe or a socket."""
    try:
        mode = path.stat().st_mode
    except OSError:  # there is none
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
