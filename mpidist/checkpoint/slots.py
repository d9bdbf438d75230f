"""Slots of commits: two folders of checkpoint files in a node's memory, written in turn.

``/dev/shm/mpidist-<uid>-<job>/<run>/slot-0`` and ``slot-1``. A slot counts from the moment at which
it has its manifest, which is written last and removed first, so a process that dies within a commit
leaves the commit before. The memory belongs to the node, not to a process: a new process of the job
finds it. Each process holds a shared lock on the job's folder; the last one that ends removes the
folder, and ``mpidist clean`` those without a process. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from mpidist.checkpoint import files, manifest
from mpidist.checkpoint.manifest import Manifest
from mpidist.comm.mpi import runtime
from mpidist.errors import CheckpointError

MEMORY = Path("/dev/shm")
_LOCK = "lock"
# Identify the job, also for processes that are started again in it; the first one that is set.
_JOB_VARIABLES = (
    "MPIDIST_JOB",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
    "PMIX_NAMESPACE",
)
ADVICE = "remove it with `mpidist clean`"


def has_name(environ: Mapping[str, str]) -> bool:
    """Return whether a new launch in this environment is of the same job (pure)."""
    return any(environ.get(name) for name in _JOB_VARIABLES if name != "PMIX_NAMESPACE")


def job_name(environ: Mapping[str, str], otherwise: str) -> str:
    """Return the name of a job in file names (pure).

    Args:
        environ: Usually ``os.environ``.
        otherwise: The name of a job without one of its own.
    """
    found = next((environ[name] for name in _JOB_VARIABLES if environ.get(name)), otherwise)
    return re.sub(r"[^A-Za-z0-9.-]", "_", found)[:80]


def jobs_folders() -> list[Path]:
    """Return the folders of this user's jobs in this node's memory."""
    return sorted(MEMORY.glob(f"mpidist-{os.geteuid()}-*"))


def clean() -> tuple[list[Path], list[Path]]:
    """Remove the folders that no process uses; return them, and those in use."""
    removed: list[Path] = []
    used: list[Path] = []
    for folder in jobs_folders():
        (removed if _removed_if_unused(folder) else used).append(folder)
    return removed, used


def _removed_if_unused(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        lock = -1
    try:
        if lock != -1:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        if lock != -1:
            os.close(lock)


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
        if self._lock != -1:
            return
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.require_own()
        self._lock = os.open(
            self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        runtime.close_at_exit(self, stage=3)

    def require_own(self) -> None:
        """Require a folder of this user alone.

        Raises:
            CheckpointError: It is another user's, open to others, or a link.
        """
        status = self.path.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
            raise CheckpointError(
                f"{self.path} is no folder of this user alone, and may hold anything; {ADVICE}, or "
                "set MPIDIST_JOB to another name"
            )

    def close(self, timeout_s: float) -> None:
        """Give up the lock at the process's end; the last process of the node removes the folder.

        After an uncaught exception the folder stays, for the job's next start.
        """
        if self._lock == -1:
            return
        lock, self._lock = self._lock, -1
        # The call gives up the shared lock also where it fails.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if getattr(sys, "last_value", None) is None:
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(lock)


# Of this process, by path: kept when the process leaves its world, because its next one goes on.
_jobs: dict[Path, JobFolder] = {}


class Slots:
    """The two slots of one run in this node's memory.

    Args:
        job: Name of the job.
        folder: Of the run's checkpoints, which identifies the run within the job.
    """

    def __init__(self, job: str, folder: Path) -> None:
        path = MEMORY / f"mpidist-{os.geteuid()}-{job}"
        self._job = _jobs.setdefault(path, JobFolder(path))
        run = hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=8).hexdigest()
        self._run = path / run

    def path(self, slot: int) -> Path:
        """Return the folder of a slot."""
        return self._run / f"slot-{slot}"

    def open(self) -> None:
        """Make the run's folder; see ``JobFolder.open``."""
        self._job.open()
        self._run.mkdir(mode=0o700, exist_ok=True)

    def found(self) -> dict[int, Manifest]:
        """Return the manifests of the slots that hold a commit, by slot.

        Raises:
            CheckpointError: The folder is another user's, or a manifest is damaged or of another
                version.
        """
        if not self._job.path.exists():
            return {}
        self._job.require_own()
        held: dict[int, Manifest] = {}
        for slot in (0, 1):
            with contextlib.suppress(FileNotFoundError):
                text = files.read_manifest(self.path(slot))
                try:
                    held[slot] = manifest.from_json(text)
                except ValueError as error:
                    raise CheckpointError(f"{self.path(slot)}: {error}; {ADVICE}") from error
        return held

    def begin(self, slot: int, names: Collection[str]) -> None:
        """Make a slot's folder; keep the memory of the files that are to be written over.

        Args:
            names: Of the files to be written.
        """
        path = self.path(slot)
        (path / manifest.NAME).unlink(missing_ok=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in path.iterdir():
            if other.name not in names:
                other.unlink()

    def drop(self, slot: int) -> None:
        """Remove a slot, its manifest first."""
        (self.path(slot) / manifest.NAME).unlink(missing_ok=True)
        shutil.rmtree(self.path(slot), ignore_errors=True)

    def commit(self, slot: int, written: Manifest) -> None:
        """Write a slot's manifest, after which the slot counts."""
        partial = self.path(slot) / f"{manifest.NAME}.part"
        partial.write_text(manifest.to_json(written), encoding="utf-8")
        partial.replace(self.path(slot) / manifest.NAME)
