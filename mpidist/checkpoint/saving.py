"""Saving: every rank writes its files beside the former checkpoint, rank 0 completes them; all succeed or all raise."""

from __future__ import annotations

import operator
import os
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mpidist.checkpoint import files, model_state
from mpidist.checkpoint.manifest import Contents, Entry, Manifest
from mpidist.checkpoint.training import POWERSGD, Training
from mpidist.comm.consistency import comparing, converting_errors, same_error_on_all
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
    """Write a checkpoint, ``<folder>/step-<step>``; return its path.

    It is written as ``step-<step>.part``, brought to the disk, checked and renamed; a reader, or a
    run that was killed meanwhile, finds it whole or not at all. One run at a time uses a folder;
    what killed ones left is removed.

    Collective: over the group, between steps, with one folder that all ranks see.

    Blocks: until the checkpoint is on the disk.

    Args:
        folder: Of the run's checkpoints; made if it is not there.
        step: Number of steps so far, at least that of the last checkpoint.
        model: Module, or ``DistributedDataParallel`` of mpidist or torch; the bare module's state
            is written, by rank 0.
        optimizer: torch optimizer, written by rank 0; an ``OSS``, of which each rank writes its
            shard.
        hook_state: ``PowerSGDState``, or another object with ``state_dict()`` and
            ``load_state_dict()``; each rank's is written.
        sampler: ``ResumableSampler``, or another object with ``state_dict()``; rank 0's is written.
        scheduler: Of the learning rate; rank 0's is written.
        scaler: ``GradScaler``; rank 0's is written.
        extra: Anything of numbers, texts, tensors, and dicts, lists and tuples of them; rank 0's is
            written.
        rng: Write the generators of each rank (Python, NumPy, torch, the current CUDA device).
        keep: How many checkpoints to keep in the folder, this one included.
        group: Native group, or torch group on the backend ``mpidist``; the model's, else the
            default group, if None.

    Raises:
        CheckpointError: A rank could not write; former checkpoints are as they were (all ranks).
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
    return _written(native, Path(folder), step, keep, contents, own, training)


def group_of(group: Any, model: Any) -> Any:
    """Return the native group that is meant: the given one, that of the model's wrapper, or the default one."""
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


def _written(
    group: Any,
    folder: Path,
    step: int,
    keep: int,
    contents: Contents,
    own: dict[str, Any],
    training: Training,
) -> Path:
    where = f"{_WHERE} of step {step} in {folder}"
    part = folder / f"step-{step}.part"
    final = part.with_suffix("")
    with same_error_on_all(group, CheckpointError, where):
        if group.rank == 0:
            files.begin(folder, step)
    try:
        entries: dict[str, Entry] = {}
        with same_error_on_all(group, CheckpointError, where):
            files.wait_for(part)
            entries = {name: files.write(part / name, value) for name, value in own.items()}
        if contents.hook == POWERSGD:
            with converting_errors(CheckpointError, where):
                path = powersgd.save(
                    part, model_state.data_parallel(training.model), training.hook_state
                )
            with same_error_on_all(group, CheckpointError, where):
                entries[path.name] = files.settle(path)
        told = group.gather_object(
            {name: (entry.bytes, entry.sha256) for name, entry in entries.items()}, 0
        )
        with same_error_on_all(group, CheckpointError, where):
            if group.rank == 0:
                every = {name: Entry(*entry) for held in told for name, entry in held.items()}
                files.commit(part, Manifest(step, group.size, every, contents, _versions()))
                _prune(folder, step, keep)
    except MpidistError:
        # All ranks have stopped writing: they raise together.
        if group.rank == 0:
            files.discard(part)
        raise
    return final


def _prune(folder: Path, step: int, keep: int) -> None:
    try:
        files.prune(folder, step, keep)
    except OSError as problem:  # the new checkpoint is there all the same
        warnings.warn(f"an old checkpoint could not be removed: {problem}", stacklevel=4)


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
