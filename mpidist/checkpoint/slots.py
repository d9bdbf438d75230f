"""Slots of commits: two folders of checkpoint files in a node's memory, written in turn.

``/dev/shm/mpidist-<uid>-<job>/<run>/slot-0`` and ``slot-1``. A slot counts from the moment at which
it has its manifest, which is written last and removed first, so a process that dies within a commit
leaves the commit before. The memory belongs to the node, not to a process (``job_folder``). Nothing
here communicates.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from mpidist.checkpoint import manifest
from mpidist.checkpoint.manifest import Manifest
from mpidist.comm.mpi import job_folder
from mpidist.comm.mpi.job_folder import ADVICE
from mpidist.errors import CheckpointError
from mpidist.file_errors import naming


class Slots:
    """The two slots of one run in this node's memory.

    Args:
        job: Name of the job.
        folder: Of the run's checkpoints, which identifies the run within the job.
    """

    def __init__(self, job: str, folder: Path) -> None:
        self._job = job_folder.of_job(job)
        run = hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=8).hexdigest()
        self._run = self._job.path / run

    def path(self, slot: int) -> Path:
        """Return the folder of a slot."""
        return self._run / f"slot-{slot}"

    def open(self) -> None:
        """Make the run's folder; see ``JobFolder.open``."""
        self._job.open()
        self._run.mkdir(mode=0o700, exist_ok=True)

    def found(self) -> dict[int, Manifest]:
        """Return the manifests of the slots that hold a commit, by slot.

        The job's folder stays from then on, until this process ends.

        Raises:
            CheckpointError: The folder is another user's, or a manifest is damaged or of another
                version.
        """
        if not self._job.path.exists():
            return {}
        self._job.open()
        held: dict[int, Manifest] = {}
        for slot in (0, 1):
            with contextlib.suppress(FileNotFoundError):
                text = manifest.read(self.path(slot))
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
        """Write a slot's manifest, after which the slot counts.

        Raises:
            OSError: It cannot be written.
        """
        path = self.path(slot) / manifest.NAME
        partial = path.with_name(f"{path.name}.part")
        with naming(path):
            partial.write_text(manifest.to_json(written), encoding="utf-8")
        partial.replace(path)
