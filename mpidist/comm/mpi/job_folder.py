"""Folder of a job in a node's memory, and this process's lock on it.

``/dev/shm/mpidist-<uid>-<job>`` holds the commits of the job's runs and the recordings of its
processes. The memory belongs to the node, not to a process: a new process of the job finds it. Each
process holds a shared lock on the folder; the last one that ends removes the folder, and ``mpidist
clean`` those without a process. A forked child, which may outlive a killed rank, holds none.
Nothing here communicates.

The lock is on a file in the folder, and counts where the path still leads to that file, for which a
process looks after it has the lock (``_locked``). A folder is removed under an exclusive lock, and
the file last of all that is in it (``_remove``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from mpidist import shared_place
from mpidist.comm.mpi import forked_child, runtime
from mpidist.errors import CheckpointError

MEMORY = Path("/dev/shm")
_LOCK = "lock"
ADVICE = "remove it with `mpidist clean`"
# Of the memory, left to MPI: one part in so many, and at most so many bytes.
_LEFT_PARTS, _LEFT_BYTES = 16, 64 << 20


def jobs_folders() -> list[Path]:
    """Return the folders of this user's jobs in this node's memory."""
    return [path for path, problem in _named_like_jobs() if not problem]


def strange_folders() -> list[str]:
    """Return a line on each folder of such a name that others own or may write."""
    return [f"{path}, which {problem}" for path, problem in _named_like_jobs() if problem]


def _named_like_jobs() -> Iterator[tuple[Path, str]]:
    for path in sorted(MEMORY.glob(f"mpidist-{os.geteuid()}-*")):
        # Another process may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            yield path, shared_place.problem_of_folder(path)


def path_of(job: str) -> Path:
    """Return the folder of a job, which need not exist."""
    return MEMORY / f"mpidist-{os.geteuid()}-{job}"


def require_room(where: int | Path, nbytes: int) -> None:
    """Require room for more bytes, beside what MPI may still need.

    Open MPI's segments in the memory are sparse, and their pages are taken as messages need them: a
    page that cannot be had is a bus error, which ends the process.

    Args:
        where: A file or folder of the memory.
        nbytes: What is to be written, beyond what the file has.

    Raises:
        OSError: There is no such room.
    """
    found = os.statvfs(where)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    left = min(total // _LEFT_PARTS, _LEFT_BYTES)
    # A memory without a limit gives no size.
    if total and free < nbytes + left:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} but what MPI may need")


def clean() -> tuple[list[Path], list[Path]]:
    """Remove the folders that no process uses; return them, and those in use."""
    removed: list[Path] = []
    used: list[Path] = []
    for folder in jobs_folders():
        (removed if _removed_if_unused(folder) else used).append(folder)
    return removed, used


def remove_recordings(kept: int) -> None:
    """Remove the oldest folders of dead jobs that hold recordings alone, but for ``kept`` others.

    A job that is killed leaves the recordings of its processes, at half a MiB each, which nobody
    may ever ask for. A commit stays.
    """
    found: list[tuple[float, Path]] = []
    for folder in jobs_folders():
        # Another process may remove it meanwhile.
        with contextlib.suppress(OSError):
            if (folder / _LOCK).exists() and not any(path.is_dir() for path in folder.iterdir()):
                found.append((folder.stat().st_mtime, folder))
    for _, folder in sorted(found)[: -kept or None]:
        _removed_if_unused(folder)


def _removed_if_unused(folder: Path) -> bool:
    try:
        lock = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if lock is not None:
        _remove(folder)
        os.close(lock)
    return True


def _locked(folder: Path, how: int) -> int | None:
    """Return the open lock of a folder; None if the folder is not there, or removed meanwhile.

    Args:
        how: ``fcntl.LOCK_SH`` waits for a process that removes the folder.

    Raises:
        BlockingIOError: With ``fcntl.LOCK_NB``, another process holds the lock.
        OSError: It cannot be opened.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    counts = False
    try:
        fcntl.flock(lock, how)
        counts = _is_of(folder, lock)
    finally:
        if not counts:
            os.close(lock)
    return lock if counts else None


def _is_of(folder: Path, lock: int) -> bool:
    """Return whether an open file is the lock of the folder that is there now."""
    try:
        return os.path.samestat((folder / _LOCK).lstat(), os.fstat(lock))
    except OSError:
        return False


def _remove(folder: Path) -> None:
    """Remove a folder whose lock this process holds alone, as far as it can be removed."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name == _LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        (folder / _LOCK).unlink()
        # Another process may have made a lock of its own.
        folder.rmdir()


class JobFolder:
    """Folder of a job in this node's memory, and this process's lock on it.

    Args:
        path: The folder; made by ``open``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def open(self) -> None:
        """Make the folder, and hold its lock until the process ends.

        Raises:
            CheckpointError: The folder is another user's, or open to others.
            OSError: It cannot be made.
        """
        # Another program may have removed the folder, which is made anew then.
        if self._lock != -1 and _is_of(self.path, self._lock):
            return
        lock = None
        while lock is None:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            # Another process may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                self.require_own()
                lock = _locked(self.path, fcntl.LOCK_SH)
        former, self._lock = self._lock, lock
        if former != -1:
            os.close(former)
        runtime.close_at_exit(self, stage=3)
        forked_child.register(self)

    def require_own(self) -> None:
        """Require a folder of this user alone.

        Raises:
            CheckpointError: It is another user's, open to others, or a link.
        """
        if problem := shared_place.problem_of_folder(self.path, is_private=True):
            raise CheckpointError(
                f"{self.path} is no folder of this user alone, and may hold anything: it "
                f"{problem}; remove it, or set MPIDIST_JOB to another name"
            )

    def leave_to_parent(self) -> None:
        """Close the lock's file, which the parent has open; called in a forked child."""
        if self._lock != -1:
            lock, self._lock = self._lock, -1
            os.close(lock)

    def close(self, timeout_s: float) -> None:
        """Give up the lock at the process's end; the last process of the node removes the folder.

        After an uncaught exception, or the death of another rank, the folder stays, for the job's
        next start and for ``mpidist report``.
        """
        if self._lock == -1:
            return
        lock, self._lock = self._lock, -1
        # The call gives up the shared lock also where it fails.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            failure = runtime.unfinished()
            has_lost = failure is not None and bool(failure.dead)
            has_failed = has_lost or getattr(sys, "last_value", None) is not None
            if not has_failed and _is_of(self.path, lock):
                _remove(self.path)
        os.close(lock)


# Of this process, by path: kept when the process leaves its world, because its next one goes on.
_jobs: dict[Path, JobFolder] = {}


def of_job(job: str) -> JobFolder:
    """Return this process's folder of a job."""
    path = path_of(job)
    return _jobs.setdefault(path, JobFolder(path))
