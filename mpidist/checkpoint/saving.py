"""Saving of checkpoints: each rank writes its files, then rank 0 commits; all succeed or raise."""

from __future__ import annotations

import functools
import operator
import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import SupportsIndex

import torch

from mpidist import progress_bar
from mpidist.checkpoint import digested_file, files, model_state, progress
from mpidist.checkpoint.manifest import Contents, Entry, Manifest
from mpidist.checkpoint.training import Stateful, Training
from mpidist.comm.consistency import comparing, same_error_on_all
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.world_group import native_group
from mpidist.errors import CheckpointError, MpidistError

_WHERE = "checkpoint.save"


def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    hook_state: Stateful | None = None,
    sampler: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: object = None,
    rng: bool = True,
    keep: int = 2,
    group: AnyGroup = None,
) -> Path:
    """Write the checkpoint ``<folder>/step-<step>``; return its path.

    The files are written to ``step-<step>.part``, synced, checked and renamed, so a reader sees the
    whole checkpoint or none, also after the run was killed. A folder is for one run at a time;
    parts left by killed runs are removed. Rank 0 writes state that is the same on all ranks.

    Collective: over the group, between steps, with one folder that all ranks see.

    Blocks: until the checkpoint is on the disk.

    Args:
        folder: For the run's checkpoints; made if missing.
        step: Number of steps so far, at least that of the last checkpoint.
        model: Module, or ``DistributedDataParallel`` of mpidist or torch, whose bare module's state
            is written.
        optimizer: torch optimizer, or an ``OSS``, whose shards all ranks write.
        hook_state: ``PowerSGDState``, ``DiLoCo`` (then without its inner optimizer), or another
            object with state; each rank's is written.
        sampler: ``ResumableSampler``, or another object with ``state_dict()`` and
            ``load_state_dict()``; rank 0's is written, as of the next two.
        scheduler: Of the learning rate.
        scaler: ``GradScaler``.
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
    with progress_bar.spinner(f"saves step {step}", native.rank):
        return _agreed(native, folder, step, keep, training, rng, extra).run()


def group_of(group: AnyGroup, model: torch.nn.Module) -> Group:
    """Return the native group: the given one, that of the model's wrapper, or the default one."""
    if group is None:
        layers = (layer for layer in model_state.wrappers(model) if hasattr(layer, "process_group"))
        group = getattr(next(layers, None), "process_group", None)
    return native_group(group)


def _agreed(
    group: Group,
    folder: str | os.PathLike[str],
    step: int,
    keep: int,
    training: Training,
    with_rng: bool,
    extra: object,
) -> _Saving:
    """Check the arguments of all ranks, and read this rank's state. Collective: over the group."""
    own: dict[str, object] = {}
    contents = Contents()
    with comparing(group, _WHERE) as rows:
        folder = Path(folder)
        step, keep = count(_WHERE, "step", step, 0), count(_WHERE, "keep", keep, 1)
        training.require_usable(group.rank, group.size)
        contents = training.contents(bool(with_rng))
        rows += [
            ("folder", str(folder)),
            ("step", step),
            ("keep", keep),
            ("state of", str(contents)),
        ]
        own = training.files(contents, extra, group.rank, group.size, has_shared=group.rank == 0)
    return _Saving(group, Path(folder), step, keep, contents, training, own)


@dataclass(frozen=True)
class _Saving:
    """One save on one rank."""

    group: Group
    folder: Path
    step: int
    keep: int
    contents: Contents
    training: Training
    own: dict[str, object]  # this rank's state by file name

    def run(self) -> Path:
        """Write this rank's files; return the checkpoint's folder. Collective: over the group."""
        part = self.folder / f"step-{self.step}.part"
        with self._same_error_on_all():
            if self.group.rank == 0:
                files.begin(self.folder, self.step)
        try:
            self._commit(part, self._written(part))
        except MpidistError:
            # All ranks raise together, so no rank is still writing.
            if self.group.rank == 0:
                files.discard(part)
            raise
        return part.with_suffix("")

    def _written(self, part: Path) -> dict[str, Entry]:
        with self._same_error_on_all():
            files.wait_for(part)
            entries = {
                name: digested_file.write(part / name, value) for name, value in self.own.items()
            }
        return entries

    def _commit(self, part: Path, entries: dict[str, Entry]) -> None:
        rows = {name: (entry.bytes, entry.digest) for name, entry in entries.items()}
        gathered = self.group.gather_object(rows, 0)
        with self._same_error_on_all():
            if self.group.rank == 0:
                every = {name: Entry(*row) for rows in gathered or () for name, row in rows.items()}
                manifest = Manifest(self.step, self.group.size, every, self.contents, versions())
                files.commit(part, manifest)
                progress.note(self.step)
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


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of mpidist and torch, for a manifest."""
    try:
        own = metadata.version("mpidist")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {"mpidist": own, "torch": torch.__version__}


def count(where: str, name: str, value: object, least: int) -> int:
    """Return an argument as an int.

    Raises:
        TypeError, ValueError: It is no int, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{where}: {name} must be an int; got {value!r}")
    if operator.index(value) < least:
        raise ValueError(f"{where}: {name} must be at least {least}; got {value}")
    return operator.index(value)
