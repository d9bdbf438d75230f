"""Saving of checkpoints: each rank writes its files, then rank 0 commits; all succeed or raise."""

from __future__ import annotations

import operator
import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mpidist.checkpoint import files, model_state
from mpidist.checkpoint.manifest import Contents, Entry, Manifest
from mpidist.checkpoint.training import POWERSGD, Training
from mpidist.comm.consistency import comparing, converting_errors, same_error_on_all
from mpidist.comm.group_protocol import Group
from mpidist.comm.resolve_group import native_group
from mpidist.ddp.hooks import checkpoint as powersgd
from mpidist.errors import CheckpointError, MpidistError

_WHERE = "checkpoint.save"


def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: Any,
    optimizer: Any = None,
    hook_state: Any = None,
    sampler: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Any = None,
    rng: bool = True,
    keep: int = 2,
    group: Any = None,
) -> Path:
    """Write the checkpoint ``<folder>/step-<step>``; return its path.

    The files are written to ``step-<step>.part``, synced, checked and renamed, so a reader sees the
    whole checkpoint or none, also after the run was killed. A folder is for one run at a time;
    parts left by killed runs are removed.

    Collective: over the group, between steps, with one folder that all ranks see.

    Blocks: until the checkpoint is on the disk.

    Args:
        folder: For the run's checkpoints; made if missing.
        step: Number of steps so far, at least that of the last checkpoint.
        model: Module, or ``DistributedDataParallel`` of mpidist or torch. Rank 0 writes the state
            of the bare module.
        optimizer: torch optimizer, written by rank 0; or an ``OSS``, whose shards all ranks write.
        hook_state: ``PowerSGDState``, or an object with ``state_dict()`` and ``load_state_dict()``;
            each rank's is written.
        sampler: ``ResumableSampler``, or an object with ``state_dict()``; rank 0's is written.
        scheduler: Of the learning rate; rank 0's is written.
        scaler: ``GradScaler``; rank 0's is written.
        extra: Numbers, texts, tensors, and dicts, lists and tuples of them; rank 0's is written.
        rng: Write the generators of each rank (Python, NumPy, torch, the current CUDA device).
        keep: Number of checkpoints to keep in the folder, this one included.
        group: Native group, or torch group on the backend ``mpidist``; the model's, else the
            default group, if None.

    Raises:
        CheckpointError: A rank could not write; earlier checkpoints are unchanged (all ranks).
        TypeError, ValueError: A wrong argument, before anything is written.
        DisagreementError: Ranks give different arguments, or another rank's is wrong.
    """
    native = group_of(group, model)
    training = Training(model, optimizer, hook_state, sampler, scheduler, scaler)
    own: dict[str, Any] = {}
    contents = Contents()
    with comparing(native, _WHERE) as rows:
        folder = Path(folder)
        step, keep = _count("step", step, 0), _count("keep", keep, 1)
        training.require_usable(native.rank, native.size)
        contents = training.contents(bool(rng))
        rows += [
            ("folder", str(folder)),
            ("step", step),
            ("keep", keep),
            ("state of", str(contents)),
        ]
        own = training.files(contents, extra, native.rank, native.size)
    return _Saving(native, Path(folder), step, keep, contents, training).run(own)


def group_of(group: Any, model: Any) -> Group:
    """Return the native group: the given one, that of the model's wrapper, or the default one."""
    if group is None:
        group = next(
            (
                layer.process_group
                for layer in model_state.wrappers(model)
                if hasattr(layer, "process_group")
            ),
            None,
        )
    return native_group(group)


@dataclass(frozen=True)
class _Saving:
    """One save on one rank."""

    group: Group
    folder: Path
    step: int
    keep: int
    contents: Contents
    training: Training

    def run(self, own: dict[str, Any]) -> Path:
        """Write this rank's files; return the checkpoint's folder. Collective: over the group.

        Args:
            own: This rank's state by file name.
        """
        part = self.folder / f"step-{self.step}.part"
        with self._same_error_on_all():
            if self.group.rank == 0:
                files.begin(self.folder, self.step)
        try:
            self._commit(part, self._written(part, own))
        except MpidistError:
            # All ranks raise together, so no rank is still writing.
            if self.group.rank == 0:
                files.discard(part)
            raise
        return part.with_suffix("")

    def _written(self, part: Path, own: dict[str, Any]) -> dict[str, Entry]:
        with self._same_error_on_all():
            files.wait_for(part)
            entries = {name: files.write(part / name, value) for name, value in own.items()}
        if self.contents.hook == POWERSGD:
            with converting_errors(CheckpointError, self._where):
                module = model_state.data_parallel(self.training.model)
                path = powersgd.save(part, module, self.training.hook_state)
            with self._same_error_on_all():
                entries[path.name] = files.sync(path)
        return entries

    def _commit(self, part: Path, entries: dict[str, Entry]) -> None:
        rows = {name: (entry.bytes, entry.sha256) for name, entry in entries.items()}
        gathered = self.group.gather_object(rows, 0)
        with self._same_error_on_all():
            if self.group.rank == 0:
                every = {name: Entry(*row) for rows in gathered or () for name, row in rows.items()}
                versions = _versions()
                manifest = Manifest(self.step, self.group.size, every, self.contents, versions)
                files.commit(part, manifest)
                _prune(self.folder, self.step, self.keep)

    @property
    def _where(self) -> str:
        return f"{_WHERE} of step {self.step} in {self.folder}"

    def _same_error_on_all(self) -> AbstractContextManager[None]:
        return same_error_on_all(self.group, CheckpointError, self._where)


def _prune(folder: Path, step: int, keep: int) -> None:
    try:
        files.prune(folder, step, keep)
    except OSError as error:
        # The new checkpoint is complete, so this is no error.
        warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=5)


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("mpidist")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {"mpidist": own, "torch": torch.__version__}


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{_WHERE}: {name} must be an int; got {value!r}")
    if operator.index(value) < least:
        raise ValueError(f"{_WHERE}: {name} must be at least {least}; got {value}")
    return operator.index(value)
