"""Two users of one machine: a folder that both may write, and code that runs as one of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.tools.support import missing

VICTIM, OTHER = 54001, 54002  # user ids


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Return a folder as ``/tmp`` is: all may write it, and remove what is theirs."""
    if os.geteuid() != 0:
        missing("a test with two users needs root")
    path = Path(tempfile.mkdtemp(prefix="two-users-"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def as_user(user: int) -> Iterator[None]:
    """Run the context as a user, and in no group of root's."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
