"""fsync of a folder: makes names of files that were created or renamed in it durable."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk (POSIX fsync).

    Raises:
        OSError: The disk reports an error.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot sync a folder, and order renames by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(folder)
            raise
    finally:
        os.close(handle)
