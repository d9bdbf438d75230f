"""Files in places where other users may write: a node's memory, folders that a user names.

Whoever may write a folder may put there a link, a pipe, a file of any size, or a file of the name
that this process is about to take. So a file is opened there by ``opened`` alone, made by ``made``,
and a folder of ours is told from another user's by ``problem_of_folder``.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_READ = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer
_MAKE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def opened(path: Path, most_bytes: int, *, is_own: bool = True, writes: bool = False) -> int:
    """Return the descriptor of a regular file, which is not reached through a link.

    Args:
        most_bytes: Largest size.
        is_own: Require a file of this user.
        writes: Open it for reading and writing.

    Raises:
        OSError: There is no such file, it is none of these, or it cannot be opened.
    """
    handle = os.open(path, _READ | (os.O_RDWR if writes else os.O_RDONLY))
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "It is no regular file", os.fspath(path))
        if is_own and status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"It belongs to user {status.st_uid}", os.fspath(path))
        if status.st_size > most_bytes:
            raise OSError(
                errno.EFBIG, f"It has {status.st_size} bytes, above {most_bytes}", os.fspath(path)
            )
    except BaseException:
        os.close(handle)
        raise
    return handle


def text_of(path: Path, most_bytes: int, *, is_own: bool = True) -> str:
    """Return what a file of text says; see ``opened``."""
    with open(opened(path, most_bytes, is_own=is_own), "rb") as file:
        return file.read(most_bytes).decode(errors="replace")


def made(path: Path, flags: int) -> int:
    """Return the descriptor of a new file for this user alone, which replaces a file of this name.

    Args:
        flags: ``os.O_RDWR`` and the like.

    Raises:
        OSError: It cannot be made, or the other one, of another user, not be removed.
    """
    path.unlink(missing_ok=True)
    return os.open(path, flags | _MAKE, 0o600)


def problem_of_folder(path: Path, *, is_private: bool = False) -> str:
    """Return why a folder is none that this user alone may write; empty if it is one.

    Args:
        is_private: Nor may others read it.

    Raises:
        OSError: There is none.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    open_bits = 0o077 if is_private else 0o022
    return "is open to other users" if stat.S_IMODE(status.st_mode) & open_bits else ""
