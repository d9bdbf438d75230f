"""Names of files in errors of the operating system.

An open that fails names its file. A write, a flush, an fsync or an allocation does not, and *No
space left on device* alone does not say what is full: a disk, or the node's memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a file in an error of the block that names none.

    Raises:
        OSError: As the block raises it.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise
