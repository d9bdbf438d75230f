"""Loading of checkpoints: rank 0 chooses, each rank checks and reads its files, then all load.

All checks come before the first object is changed, so that all ranks load or none does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist import saved_file
from mpidist.checkpoint import files, manifest, model_state, rng
from mpidist.checkpoint.manifest import MODEL, OPTIMIZER, TRAINING, Manifest
from mpidist.checkpoint.saving import group_of
from mpidist.checkpoint.training import (
    OWN_NAMES,
    POWERSGD,
    SHARDS,
    SHARED_NAMES,
    STATE,
    WHOLE,
    Training,
    require_names,
)
from mpidist.comm.consistency import (
    comparing,
    converting_errors,
    describe,
    maximum,
    same_error_on_all,
)
from mpidist.comm.group_protocol import Group
from mpidist.ddp.hooks import checkpoint as powersgd
from mpidist.errors import CheckpointError
from mpidist.zero.merging import merged

_WHERE = "checkpoint.load"


@dataclass(frozen=True)
class Resumed:
    """Description of a loaded checkpoint."""

    step: int
    extra: Any  # as it was saved
    saved_by: int  # ranks of the run that wrote it
    path: Path


def load(
    folder: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = None,
    hook_state: Any = None,
    sampler: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    group: Any = None,
    map_location: Any = None,
) -> Resumed | None:
    """Load the newest complete checkpoint of a folder; return its description, None without one.

    With the number of ranks that wrote the checkpoint, training continues with the same bits. With
    another number the shards of an ``OSS`` are redistributed, the sampler continues in the same
    order, PowerSGD keeps its mean error, another hook gets rank 0's state, and generators are
    reseeded (with the same seeds at each load), with a warning. Folders without a manifest, from
    unfinished saves, are skipped with a warning.

    Collective: over the group. The objects are those of a new run: models constructed, hooks
    registered or not.

    Blocks: until all ranks have loaded.

    Args:
        folder: Of the run's checkpoints, or one checkpoint.
        model: As for ``save``; its wrapper may differ.
        optimizer: Of the saved class, or an ``OSS`` of that class. State is not loaded for this and
            the following arguments if None.
        hook_state: Object to load; registered with the module or not.
        sampler: Object to load the position into.
        scheduler: Object to load; built on ``optimizer``.
        scaler: Object to load.
        group: As for ``save``.
        map_location: Device that tensors are read to before they are loaded, as for
            ``torch.load``; the CPU if None.

    Raises:
        CheckpointError: The checkpoint is damaged, incomplete or of another model; the text names
            the part (all ranks).
        TypeError, ValueError: A wrong argument.
        DisagreementError: Ranks give different arguments, or another rank's is wrong.
    """
    native = group_of(group, model)
    training = Training(model, optimizer, hook_state, sampler, scheduler, scaler)
    with comparing(native, _WHERE) as rows:
        folder = Path(folder)
        training.require_usable(native.rank, native.size)
        asked = [name for name, taker in training.asked().items() if taker is not None]
        rows += [("folder", str(folder)), ("arguments", asked)]
    chosen: tuple[str, str] | None = None
    with same_error_on_all(native, CheckpointError, f"{_WHERE} from {folder}"):
        if native.rank == 0:
            chosen = _chosen(Path(folder))
    chosen = native.broadcast_object(chosen, 0)
    if chosen is None:
        return None
    path, text = chosen
    return _Loading(native, training, Path(path), manifest.from_json(text), map_location).run()


def _chosen(folder: Path) -> tuple[str, str] | None:
    """Return path and manifest text of the checkpoint to load, or None."""
    path = files.latest(folder)
    for found in files.listed(folder):
        if found.path == path:
            break
        if not found.is_complete:
            then = "is passed over" if path is None else f"is passed over for {path.name}"
            warnings.warn(
                f"{found.path} has no {manifest.NAME}: its save was cut short, and it {then}",
                stacklevel=4,
            )
    if path is None:
        return None
    try:
        text = files.read_manifest(path)
        described = manifest.from_json(text)
    except ValueError as error:
        raise CheckpointError(
            f"{path.name}: {error}; without its folder the one before is taken"
        ) from error
    # A file that rank 0 misses is missing for all; the other ranks need not wait for it.
    absent = [name for name in described.files if not (path / name).is_file()]
    if absent:
        raise CheckpointError(f"{path.name} is incomplete: {', '.join(absent)} missing; {_ADVICE}")
    return str(path), text


_ADVICE = "remove its folder to go on from the one before"


@contextmanager
def _as_damage() -> Iterator[None]:
    """Explain errors from a file of another structure; other errors keep their texts."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"a file is damaged, or not as this version writes it ({describe(error)}); {_ADVICE}"
        ) from error


class _Loading:
    """One load on one rank."""

    def __init__(
        self, group: Group, training: Training, path: Path, written: Manifest, map_location: Any
    ) -> None:
        self._group = group
        self._training = training
        self._path = path
        self._manifest = written
        self._contents = written.contents
        self._is_same_size = written.world_size == group.size
        self._map_location = "cpu" if map_location is None else map_location
        self._where = f"{_WHERE} from {path}"

    def run(self) -> Resumed:
        """Load. Collective: over the group."""
        training, written = self._training, self._manifest
        with self._same_error_on_all():
            training.require_held(self._contents)
            names = self._own_names()
            self._require_sound(names)
        with self._same_error_on_all(), _as_damage():
            shared = self._read(TRAINING)
            require_names(TRAINING, shared, SHARED_NAMES)
            model = self._read(MODEL, mmap=True)
            whole = self._read(OPTIMIZER) if OPTIMIZER in names else None
            own_name = manifest.rank_file(self._group.rank, written.world_size)
            own = self._own(own_name) if own_name in names else {}
        is_merged = self._needs_merged(own)
        self._check_all(is_merged)
        hook: Any = None
        with self._same_error_on_all(), _as_damage():
            if is_merged:
                shards = [self._of_rank(rank)["optimizer"] for rank in range(written.world_size)]
                whole = merged(shards)
                if any(shard["masters"] for shard in shards):
                    self._warn(
                        "a narrow wire's master copies are renewed from the parameters, which have "
                        "rounded values"
                    )
            if training.hook_state is not None and self._contents.hook == STATE:
                hook = (own if self._is_same_size else self._of_rank(0))["hook"]
            # A rank's own shard has the groups of the whole.
            training.require_fits(
                model,
                shared,
                own["optimizer"] if whole is None and training.is_sharded() else whole,
            )
            if own.get("buffers") is not None:
                training.require_own_buffers(own["buffers"])
            if own and self._contents.rng:
                rng.require_state(own["rng"])
        with self._same_error_on_all(), _as_damage():
            training.load_shared(model, shared)
            if hook is not None:
                training.hook_state.load_state_dict(hook)
            if own.get("buffers") is not None:
                training.load_own_buffers(own["buffers"])
            if whole is not None and not training.is_sharded():
                training.optimizer.load_state_dict(whole)
        self._load_collectively(shared, own, whole)
        with self._same_error_on_all():
            self._load_rng(own)
        return Resumed(written.step, shared["extra"], written.world_size, self._path)

    def _same_error_on_all(self) -> AbstractContextManager[None]:
        return same_error_on_all(self._group, CheckpointError, self._where)

    def _own_names(self) -> list[str]:
        names, rank, size = [MODEL, TRAINING], self._group.rank, self._manifest.world_size
        if self._training.optimizer is not None and self._contents.optimizer == WHOLE:
            names.append(OPTIMIZER)
        if self._is_same_size and manifest.has_rank_files(self._contents):
            names.append(manifest.rank_file(rank, size))
        if self._is_same_size and self._training.is_powersgd():
            names.append(manifest.powersgd_file(rank, size))
        return names

    def _require_sound(self, names: Iterable[str]) -> None:
        for name in names:
            files.wait_for(self._path / name)
        found = files.problems(self._path, {name: self._manifest.files[name] for name in names})
        if found:
            raise CheckpointError(f"{'; '.join(found)}; {_ADVICE}")

    def _check_all(self, is_merged: bool) -> None:
        """Check the files that all ranks read, each on one rank. Collective: over the group."""
        size, names = self._manifest.world_size, set[str]()
        if is_merged:
            names |= {manifest.rank_file(rank, size) for rank in range(size)}
        if self._training.hook_state is not None and not self._is_same_size:
            if self._contents.hook == POWERSGD:
                names |= {manifest.powersgd_file(rank, size) for rank in range(size)}
            else:
                names.add(manifest.rank_file(0, size))
        with self._same_error_on_all():
            self._require_sound(files.share_of(names, self._group.rank, self._group.size))

    def _read(self, name: str, mmap: bool = False) -> Any:
        # A mapped file takes no memory. Tensors on a device cannot be mapped.
        mmap = mmap and str(self._map_location) == "cpu"
        try:
            found = saved_file.read(self._path / name, self._map_location, mmap)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        if type(found) is not dict:
            raise CheckpointError(
                f"{name} holds a {type(found).__name__} in the place of its dict; {_ADVICE}"
            )
        return found

    def _of_rank(self, rank: int) -> Any:
        # An ordinary optimizer keeps the loaded tensors, which must outlive the file: no mapping.
        return self._own(
            manifest.rank_file(rank, self._manifest.world_size), mmap=self._training.is_sharded()
        )

    def _own(self, name: str, mmap: bool = False) -> Any:
        found = self._read(name, mmap)
        require_names(name, found, OWN_NAMES)
        return found

    def _needs_merged(self, own: dict[str, Any]) -> bool:
        """Return whether each rank needs the shards of all ranks. Collective: over the group."""
        if self._training.optimizer is None or self._contents.optimizer != SHARDS:
            return False
        if not self._training.is_sharded() or not self._is_same_size:
            return True
        here = self._training.optimizer.rank_local_state_dict(copies=False)
        with self._same_error_on_all(), _as_damage():
            is_other = bool(here["layout"] != own["optimizer"]["layout"])
        return bool(maximum(self._group, int(is_other)))

    def _load_collectively(self, shared: dict[str, Any], own: dict[str, Any], whole: Any) -> None:
        """Load the objects that communicate as they load. Collective: over the group."""
        training = self._training
        with converting_errors(CheckpointError, self._where):
            if training.is_sharded():
                training.optimizer.load_state_dict(own["optimizer"] if whole is None else whole)
            wrapper = model_state.data_parallel(training.model)
            if training.is_powersgd():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about the state's group, which is kept
                    training.load_powersgd(powersgd.load(self._path, wrapper, self._map_location))
            elif wrapper is not None and self._is_same_size and shared["buckets"] is not None:
                wrapper.use_bucket_plan(shared["buckets"])

    def _load_rng(self, own: dict[str, Any]) -> None:
        if not self._contents.rng:
            return
        if self._is_same_size:
            rng.restore(own["rng"])
            return
        rng.reseed(self._manifest.files[TRAINING].sha256, self._group.rank, self._group.size)
        self._warn(
            f"the checkpoint is of {self._manifest.world_size} ranks, and this run has "
            f"{self._group.size}: random number generators "
            "are reseeded, with the same seeds at each load"
        )

    def _warn(self, text: str) -> None:
        if self._group.rank == 0:
            warnings.warn(f"{self._path}: {text}", stacklevel=5)
