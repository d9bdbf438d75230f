"""Loading of checkpoints: rank 0 chooses, each rank checks and reads its files, then all load.

All checks come before the first object is changed, so that all ranks load or none does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpidist import progress_bar, state_scalars
from mpidist.checkpoint import commits, dtensors, files, manifest, model_state, rng
from mpidist.checkpoint.manifest import MODEL, OPTIMIZER, TRAINING
from mpidist.checkpoint.reading import Reader, reporting_damage
from mpidist.checkpoint.saving import group_of
from mpidist.checkpoint.training import (
    DTENSORS,
    POWERSGD,
    SHARDS,
    STATE,
    WHOLE,
    RankState,
    SharedState,
    Stateful,
    Training,
)
from mpidist.comm.consistency import comparing, converting_errors, maximum, same_error_on_all
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.mpi import job_folder
from mpidist.ddp.hooks import checkpoint as powersgd
from mpidist.errors import CheckpointError
from mpidist.zero.state.merging import merged
from mpidist.zero.state.rank_local import RankLocalState

if TYPE_CHECKING:
    import torch
    from torch.serialization import MAP_LOCATION

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
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    hook_state: Stateful | None = None,
    sampler: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    group: AnyGroup = None,
    map_location: MAP_LOCATION = None,
) -> Resumed | None:
    """Load the newest complete checkpoint of a folder; return its description, None without one.

    A commit of the same folder (``commit``) that is no older, and that the memories of the nodes
    hold whole, is loaded in its place; later commits, which some ranks lack, are removed.

    With the number of ranks that wrote the checkpoint, training continues with the same bits. With
    another number the shards of an ``OSS`` are redistributed, the sampler continues in the same
    order, PowerSGD and the adaptive hook keep their mean error, another hook gets rank 0's state,
    and generators are reseeded (with the same seeds at each load), with a warning. DTensors are
    loaded by as many ranks as saved them, on an equal mesh; another number is an error. Folders
    without a manifest, from unfinished saves, are skipped with a warning.

    Collective: over the group. The objects are those of a new run: models constructed, hooks
    registered or not.

    Blocks: until all ranks have loaded.

    Args:
        folder: Of the run's checkpoints, or one checkpoint.
        model: As for ``save``; its wrapper may differ.
        optimizer: Of the saved class, or an ``OSS`` of that class. The state of this object, and of
            each of the following four, is loaded unless the argument is None.
        hook_state: ``PowerSGDState``, registered with the module already or not, ``DiLoCo``, or
            another object with state.
        sampler: ``ResumableSampler``, or another object with ``load_state_dict()``.
        scheduler: Built on ``optimizer``.
        group: As for ``save``.
        map_location: Device that tensors are read to before they are loaded, as for
            ``torch.load``; the CPU if None.

    Raises:
        CheckpointError: The checkpoint is damaged, incomplete or of another model (all ranks).
        TypeError, ValueError: A wrong argument.
        DisagreementError: Ranks give different arguments, or another rank's is wrong.
    """
    native = group_of(group, model)
    training = Training(model, optimizer, hook_state, sampler, scheduler, scaler)
    chosen = _chosen(native, training, folder)
    # A folder that is itself a checkpoint was chosen by the caller.
    is_given = chosen is not None and chosen[0].resolve() == Path(folder).resolve()
    held = None if is_given else commits.held(native, folder)
    if held is not None and (chosen is None or manifest.from_json(chosen[1]).step <= held.step):
        held.take()
        reader = Reader(held.path, held.manifest, map_location)
        with progress_bar.spinner(f"loads the commit of step {held.step}", native.rank):
            is_left = not held.commits.has_written
            return _Loading(native, training, reader, held.bring, is_left).run()
    if chosen is None:
        return None
    path, text = chosen
    reader = Reader(path, manifest.from_json(text), map_location)
    with progress_bar.spinner(f"loads {path.name}", native.rank):
        return _Loading(native, training, reader).run()


def _chosen(
    group: Group, training: Training, folder: str | os.PathLike[str]
) -> tuple[Path, str] | None:
    """Return path and manifest text of the checkpoint that rank 0 chooses, on all ranks."""
    with comparing(group, _WHERE) as rows:
        # Of the commits, which each rank looks for by itself.
        files.absolute(folder)
        folder = Path(folder)
        training.require_usable(group.rank, group.size)
        asked = [name for name, taker in training.asked().items() if taker is not None]
        rows += [("folder", str(folder)), ("arguments", asked)]
    chosen: tuple[str, str] | None = None
    with same_error_on_all(group, CheckpointError, f"{_WHERE} from {folder}"):
        if group.rank == 0:
            chosen = files.choose(Path(folder))
    chosen = group.broadcast_object(chosen, 0)
    return None if chosen is None else (Path(chosen[0]), chosen[1])


@dataclass
class _State:
    """State that one rank has read."""

    model: dict[str, Any]
    shared: SharedState
    own: RankState | None  # None for another number of ranks, or without files of ranks
    whole: dict[str, Any] | None  # the optimizer's, of its file or merged from all shards
    hook: object = None

    def shard(self) -> RankLocalState | dict[str, Any]:
        """Return the state that this rank's sharded optimizer loads."""
        return _shard_of(self.own) if self.whole is None else self.whole


class _Loading:
    """One load on one rank.

    Args:
        bring: Brings files of a commit to this rank's node, collectively; None for a checkpoint.
        is_left: An earlier start has left the commit.
    """

    def __init__(
        self,
        group: Group,
        training: Training,
        reader: Reader,
        bring: Callable[[Sequence[str]], None] | None = None,
        is_left: bool = False,
    ) -> None:
        self._group = group
        self._bring = bring
        self._training = training
        self._reader = reader
        self._world_size = reader.manifest.world_size
        self._contents = reader.manifest.contents
        self._is_same_size = self._world_size == group.size
        self._where = f"{_WHERE} from {reader.path}"
        if is_left:
            # The user may know of no other run: another program has committed under the job's name.
            self._where += (
                ", which an earlier start of this job has left in the memory of the nodes (if it "
                f"is of another run, {job_folder.ADVICE} there)"
            )

    def run(self) -> Resumed:
        """Load. Collective: over the group."""
        with self._same_error_on_all():
            self._training.require_held(self._contents)
            if self._contents.dtensors and not self._is_same_size:
                raise CheckpointError(
                    f"the checkpoint holds DTensors as {self._world_size} ranks had them, and this "
                    f"run has {self._group.size}; torch.distributed.checkpoint moves such a model "
                    "to another number"
                )
            names = self._own_names()
        if self._bring is not None:
            self._bring(names)
        with self._same_error_on_all():
            self._reader.require_sound(names)
            with reporting_damage():
                state = self._read(names)
        is_merged = self._needs_merged(state.own)
        self._require_all_sound(is_merged)
        is_hook_merged = self._needs_merged_outer_steps(state.own)
        with self._same_error_on_all(), reporting_damage():
            if is_merged:
                state.whole = self._merged()
            if self._has_hook and not is_hook_merged:
                state.hook = self._hook(state.own)
        if is_hook_merged:
            state.hook = self._merged_outer_steps()
        with self._same_error_on_all(), reporting_damage():
            self._require_fits(state)
        with self._same_error_on_all(), reporting_damage():
            self._load(state)
        if self._has_hook:
            # By itself, as the ranks of a sharded inner optimizer load their state together.
            with self._same_error_on_all(), reporting_damage():
                if state.hook is not None and self._training.hook_state is not None:
                    self._training.hook_state.load_state_dict(state.hook)
        self._load_collectively(state)
        with self._same_error_on_all():
            self._load_rng(state.own)
        reader = self._reader
        return Resumed(reader.manifest.step, state.shared["extra"], self._world_size, reader.path)

    def _same_error_on_all(self) -> AbstractContextManager[None]:
        return same_error_on_all(self._group, CheckpointError, self._where)

    def _own_names(self) -> list[str]:
        names, rank, size = [MODEL, TRAINING], self._group.rank, self._world_size
        if self._training.optimizer is not None and self._contents.optimizer == WHOLE:
            names.append(OPTIMIZER)
        if self._is_same_size and manifest.has_rank_files(self._contents):
            names.append(manifest.rank_file(rank, size))
        if self._is_same_size and self._training.powersgd is not None:
            names.append(manifest.powersgd_file(rank, size))
        if self._contents.dtensors:
            names.append(manifest.dtensor_file(rank, size))
        return names

    def _read(self, names: Sequence[str]) -> _State:
        """Return the content of this rank's files, of these names."""
        shared, model = self._reader.shared(), self._reader.model()
        whole = self._reader.optimizer() if OPTIMIZER in names else None
        has_own = manifest.rank_file(self._group.rank, self._world_size) in names
        own = self._reader.of_rank(self._group.rank) if has_own else None
        training, contents = self._training, self._contents
        if contents.dtensors:
            parts = self._reader.dtensors(self._group.rank)
            here = model_state.bare(training.model).state_dict()
            model.update(dtensors.model_state(parts, here))
            if contents.optimizer == DTENSORS and training.optimizer is not None:
                whole = dtensors.optimizer_state(parts, training.optimizer)
        return _State(model, shared, own, whole)

    def _needs_merged(self, own: RankState | None) -> bool:
        """Return whether each rank needs the shards of all ranks. Collective: over the group."""
        if self._training.optimizer is None or self._contents.optimizer != SHARDS:
            return False
        sharded = self._training.sharded
        if sharded is None or not self._is_same_size:
            return True
        here = sharded.rank_local_state_dict(copies=False)
        with self._same_error_on_all(), reporting_damage():
            is_other = bool(here["layout"] != _shard_of(own)["layout"])
        return bool(maximum(self._group, int(is_other)))

    def _require_all_sound(self, is_merged: bool) -> None:
        """Check the files that all ranks read, each on one rank. Collective: over the group."""
        size, names = self._world_size, set[str]()
        if is_merged:
            names |= {manifest.rank_file(rank, size) for rank in range(size)}
        if self._training.hook_state is not None and not self._is_same_size:
            if self._contents.hook == POWERSGD:
                names |= {manifest.powersgd_file(rank, size) for rank in range(size)}
            elif hasattr(self._training.hook_state, "merged_state_dict"):
                names |= {manifest.rank_file(rank, size) for rank in range(size)}
            else:
                names.add(manifest.rank_file(0, size))
        self._require_shared_sound(names)

    def _require_shared_sound(self, names: set[str]) -> None:
        """Bring files that all ranks read, and check each on one. Collective: over the group."""
        if not names:
            return
        if self._bring is not None:
            self._bring(sorted(names))
        with self._same_error_on_all():
            self._reader.require_sound(files.share_of(names, self._group.rank, self._group.size))

    # --- hooks ---

    @property
    def _has_hook(self) -> bool:
        return self._training.hook_state is not None and self._contents.hook == STATE

    def _needs_merged_outer_steps(self, own: RankState | None) -> bool:
        """Return whether ranks begin from rank 0's outer steps. Collective: over the group."""
        outer = self._training.outer_steps
        if outer is None or not self._has_hook:
            return False
        if not self._is_same_size:
            return True
        with self._same_error_on_all(), reporting_damage():
            is_other = not outer.continues(_outer_state_of(own))
        return bool(maximum(self._group, int(is_other)))

    def _merged_outer_steps(self) -> dict[str, Any]:
        """Return rank 0's outer steps, with its inner optimizer's state merged from all shards.

        Collective: over the group.
        """
        size = self._world_size
        self._require_shared_sound({manifest.rank_file(0, size)} if self._is_same_size else set())
        with self._same_error_on_all(), reporting_damage():
            found = _outer_state_of(self._of_rank(0))
        # No rank takes what was rank 0's own.
        found = found | {"rank": None}
        # All ranks have read one file.
        if not found["is_sharded"]:
            return found
        replica = found["replica"]
        self._require_shared_sound({manifest.rank_file(rank, size) for rank in replica})
        with self._same_error_on_all(), reporting_damage():
            shards = [_outer_state_of(self._of_rank(rank))["inner"] for rank in replica]
            return found | {"is_sharded": False, "inner": merged(shards)}

    def _hook(self, own: RankState | None) -> object:
        """Return the state that a hook's state loads, other than PowerSGD's."""
        if own is not None:
            return own["hook"]
        merge = getattr(self._training.hook_state, "merged_state_dict", None)
        if merge is None:
            return self._of_rank(0)["hook"]
        return merge([self._of_rank(rank)["hook"] for rank in range(self._world_size)])

    def _of_rank(self, rank: int) -> RankState:
        # An ordinary optimizer keeps the loaded tensors, which must outlive the file: no mapping.
        return self._reader.of_rank(rank, mmap=self._training.sharded is not None)

    def _merged(self) -> dict[str, Any]:
        """Return the optimizer's state, merged from the shards of all ranks."""
        shards = [_shard_of(self._of_rank(rank)) for rank in range(self._world_size)]
        whole = merged(shards)
        if any(shard["masters"] for shard in shards) and not self._takes_masters():
            self._warn(
                "the master copies of a wire are not loaded: this optimizer steps the parameters "
                "themselves, which have rounded values"
            )
        return whole

    def _takes_masters(self) -> bool:
        sharded = self._training.sharded
        return sharded is not None and bool(sharded.rank_local_state_dict(copies=False)["masters"])

    def _require_fits(self, state: _State) -> None:
        # A rank's own shard has the groups of the whole.
        whole = state.whole if self._training.sharded is None else state.shard()
        self._training.require_fits(state.model, state.shared, whole)
        if state.own is not None:
            if state.own["buffers"] is not None:
                self._training.require_own_buffers(state.own["buffers"])
            if self._contents.rng:
                rng.require_state(state.own["rng"])

    def _load(self, state: _State) -> None:
        """Load the objects that communicate nothing as they load."""
        training = self._training
        training.load_shared(state.model, state.shared)
        if state.own is not None and state.own["buffers"] is not None:
            training.load_own_buffers(state.own["buffers"])
        if state.whole is not None and training.optimizer is not None and training.sharded is None:
            training.optimizer.load_state_dict(state.whole)
            if isinstance(training.optimizer, torch.optim.Optimizer):
                state_scalars.restore(training.optimizer, state.whole)

    def _load_collectively(self, state: _State) -> None:
        """Load the objects that communicate as they load. Collective: over the group."""
        training, reader, buckets = self._training, self._reader, state.shared["buckets"]
        with converting_errors(CheckpointError, self._where):
            if training.sharded is not None:
                training.sharded.load_state_dict(state.shard())
            wrapper = model_state.data_parallel(training.model)
            if training.powersgd is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about the state's group, which is kept
                    own = reader.path / manifest.powersgd_file(self._group.rank, self._world_size)
                    # Another number of ranks reads all files, which were brought here.
                    has_one = self._bring is not None and self._is_same_size
                    loaded = powersgd.load(
                        reader.path, wrapper, reader.map_location, own if has_one else None
                    )
                # Copied, because the state object may be registered with the module already.
                training.powersgd.load_state_dict(loaded.state_dict())
            elif wrapper is not None and self._is_same_size and buckets is not None:
                wrapper.use_bucket_plan(buckets)

    def _load_rng(self, own: RankState | None) -> None:
        if not self._contents.rng:
            return
        if own is not None and own["rng"] is not None:
            rng.restore(own["rng"])
            return
        digest = self._reader.manifest.files[TRAINING].digest
        rng.reseed(digest, self._group.rank, self._group.size)
        self._warn(
            f"the checkpoint is of {self._world_size} ranks, and this run has {self._group.size}: "
            "random number generators are reseeded, with the same seeds at each load"
        )

    def _warn(self, text: str) -> None:
        if self._group.rank == 0:
            warnings.warn(f"{self._reader.path}: {text}", stacklevel=5)


def _outer_state_of(own: RankState | None) -> dict[str, Any]:
    found = None if own is None else own["hook"]
    if not isinstance(found, dict) or not {"rank", "replica", "is_sharded"} <= found.keys():
        raise ValueError("the checkpoint's state is that of another hook than DiLoCo")
    return found


def _shard_of(own: RankState | None) -> RankLocalState:
    shard = None if own is None else own["optimizer"]
    if shard is None:
        raise TypeError("the file of a rank holds no shard of the optimizer")
    return shard
