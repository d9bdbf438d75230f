"""State of a training run: its files, and the objects that the state is loaded into.

``model.pt``: the bare module's, once. ``optimizer.pt``: an ordinary optimizer's, once.
``training.pt``: scheduler, scaler, sampler, buckets, the user's own data. ``rank-<r>-of-<W>.pt``: a
rank's generators, its shard of an ``OSS``, its buffers and hook state. ``powersgd-<r>-of-<W>.pt``:
PowerSGD's. ``dtensors-<r>-of-<W>.pt``: a rank's part of a model's DTensors, and the state of the
optimizer that steps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, cast

import torch

from mpidist import state_names
from mpidist.checkpoint import dtensors, manifest, model_state, rng
from mpidist.checkpoint.manifest import MODEL, OPTIMIZER, TRAINING, Contents
from mpidist.checkpoint.plain_data import require_plain
from mpidist.ddp.buckets.layout import SavedPlan
from mpidist.ddp.diloco import DiLoCo
from mpidist.ddp.hooks import checkpoint as powersgd
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.inner_optimizer import is_sharded
from mpidist.zero.optimizer import OSS
from mpidist.zero.state import state_dict
from mpidist.zero.state.rank_local import RankLocalState

WHOLE, SHARDS, DTENSORS = "whole", "shards", "dtensors"
POWERSGD, STATE = "powersgd", "state"


class Stateful(Protocol):
    """Object whose state is saved and loaded: a scheduler, scaler, sampler or hook state."""

    def state_dict(self) -> object:
        """Return the state as plain data."""

    def load_state_dict(self, state: Any, /) -> object:
        """Load what ``state_dict`` returned."""


class SharedState(TypedDict):
    """Content of ``training.pt``; None for what the run did not have."""

    scheduler: object
    scaler: object
    sampler: object
    buckets: SavedPlan | None
    extra: object


class RankState(TypedDict):
    """Content of the file of one rank; None for what the run did not have."""

    optimizer: RankLocalState | None
    hook: object
    buffers: dict[str, torch.Tensor] | None
    rng: dict[str, Any] | None


@dataclass(frozen=True)
class Training:
    """Objects of a run that have state; all but the model may be None."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    hook_state: Stateful | None = None
    sampler: Stateful | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None

    def asked(self) -> dict[str, object]:
        """Return the optional objects by their argument names in ``save`` and ``load``."""
        names = ("optimizer", "hook_state", "sampler", "scheduler", "scaler")
        return {name: getattr(self, name) for name in names}

    @property
    def sharded(self) -> OSS | None:
        """The optimizer if its state is divided among the ranks, else None."""
        found = self.optimizer if is_sharded(self.optimizer) else None
        return cast("OSS | None", found)

    @property
    def powersgd(self) -> PowerSGDState | None:
        """The hook state if it is PowerSGD's, which has files of its own, else None."""
        return self.hook_state if isinstance(self.hook_state, PowerSGDState) else None

    @property
    def outer_steps(self) -> DiLoCo | None:
        """The hook state if it is that of outer steps, by which ranks' parameters differ."""
        return self.hook_state if isinstance(self.hook_state, DiLoCo) else None

    def replicated(self) -> list[torch.Tensor]:
        """Return the parameters that all ranks share, those of the last outer step included."""
        named = model_state.replicated_parameters(self.model)
        if self.outer_steps is not None:
            named = self.outer_steps.global_state(named, named)
        return list(named.values())

    def require_usable(self, rank: int, world_size: int) -> None:
        """Refuse objects whose state cannot be saved.

        Raises:
            TypeError: An object of another class.
            ValueError: A sharded optimizer over other ranks; PowerSGD's state without mpidist's
                DistributedDataParallel; the inner optimizer of outer steps, which has a state on
                each rank.
        """
        if not isinstance(model_state.bare(self.model), torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(self.model).__name__}")
        if model_state.is_flattened(self.model):
            raise TypeError(
                "model is, or holds, a FullyShardedDataParallel, whose flat parameters no file of "
                "one rank can hold: shard it by torch.distributed.fsdp.fully_shard, or save it by "
                "torch.distributed.checkpoint"
            )
        for name, taker in self.asked().items():
            if taker is not None and not (
                hasattr(taker, "state_dict") and hasattr(taker, "load_state_dict")
            ):
                hint = (
                    " (of mpidist's hooks PowerSGDState and AdaptiveState have state)"
                    if name == "hook_state"
                    else ""
                )
                raise TypeError(
                    f"{name} must have state_dict() and load_state_dict(); {type(taker).__name__} "
                    f"has not{hint}"
                )
        sharded = self.sharded
        if sharded is not None and (sharded.rank, sharded.world_size) != (rank, world_size):
            raise ValueError(
                f"the sharded optimizer is of rank {sharded.rank} of {sharded.world_size}, and the "
                f"checkpoint's group has rank {rank} of {world_size}: give group= the optimizer's"
            )
        if self.powersgd is not None and model_state.data_parallel(self.model) is None:
            raise ValueError(
                "a PowerSGDState is saved with the mpidist.ddp.DistributedDataParallel that it "
                "serves: give that as model"
            )

        if self.outer_steps is not None and self.outer_steps.inner is self.optimizer:
            raise ValueError(
                "DiLoCo saves its inner optimizer, whose state is that of each rank: leave out "
                "optimizer"
            )

    def optimizer_class(self) -> str | None:
        """Return the class name of the optimizer that steps; None without an optimizer."""
        if self.optimizer is None:
            return None
        return type(self.optimizer if self.sharded is None else self.sharded.optim).__name__

    # --- to files ---

    def contents(self, with_rng: bool) -> Contents:
        """Return the kinds of state of this run; equal on all ranks."""
        has_dtensors = any(map(dtensors.is_dtensor, model_state.bare(self.model).parameters()))
        return Contents(
            optimizer=self._optimizer_kind(has_dtensors),
            optimizer_class=self.optimizer_class(),
            hook=None if self.hook_state is None else STATE if self.powersgd is None else POWERSGD,
            scheduler=self.scheduler is not None,
            scaler=self.scaler is not None,
            sampler=self.sampler is not None,
            rng=with_rng,
            # Nothing makes buffers beside sharded parameters the same.
            buffers=model_state.keeps_own_buffers(self.model) or has_dtensors,
            dtensors=has_dtensors,
        )

    def _optimizer_kind(self, has_dtensors: bool) -> str | None:
        if self.optimizer is None:
            return None
        if self.sharded is not None:
            return SHARDS
        stepped = dtensors.parameters_of(self.optimizer) if has_dtensors else ()
        return DTENSORS if any(map(dtensors.is_dtensor, stepped)) else WHOLE

    def files(
        self,
        contents: Contents,
        extra: object,
        rank: int,
        world_size: int,
        has_shared: bool,
    ) -> dict[str, object]:
        """Return the content of one rank's files, by file name.

        Args:
            has_shared: With what is the same on all ranks.

        Raises:
            TypeError: A state is not plain data.
        """
        require_plain("extra", extra)  # checked on all ranks, rank 0's is written
        content: dict[str, object] = {}
        model: Mapping[str, Any] = {}
        if has_shared or contents.dtensors:
            bare = model_state.bare(self.model)
            model = bare.state_dict()
            if self.outer_steps is not None:
                model = self.outer_steps.global_state(model, dict(bare.named_parameters()))
        if contents.dtensors:
            model, parts = dtensors.content(
                model, self.optimizer if contents.optimizer == DTENSORS else None
            )
            content[manifest.dtensor_file(rank, world_size)] = parts
        if has_shared:
            content[MODEL] = model_state.packed(model)
            content[TRAINING] = self._shared(extra)
            if self.optimizer is not None and contents.optimizer == WHOLE:
                content[OPTIMIZER] = self.optimizer.state_dict()
        if manifest.has_rank_files(contents):
            content[manifest.rank_file(rank, world_size)] = self._own(contents)
        for name, value in content.items():
            require_plain(f"the content of {name}", value)
        if self.powersgd is not None:
            module = model_state.data_parallel(self.model)
            content[manifest.powersgd_file(rank, world_size)] = powersgd.content(
                module, self.powersgd
            )
        return content

    def _shared(self, extra: object) -> SharedState:
        wrapper = model_state.data_parallel(self.model)
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "buckets": None if wrapper is None else wrapper.bucket_plan(),
            "extra": extra,
        }

    def _own(self, contents: Contents) -> RankState:
        hook = None if self.powersgd is not None else self.hook_state
        return {
            "optimizer": None
            if self.sharded is None
            else self.sharded.rank_local_state_dict(copies=False),
            "hook": None if hook is None else hook.state_dict(),
            "buffers": model_state.buffers(self.model) if contents.buffers else None,
            "rng": rng.state() if contents.rng else None,
        }

    # --- from files ---

    def require_held(self, contents: Contents) -> None:
        """Refuse a checkpoint that lacks requested state, or has state of another class.

        Raises:
            ValueError: Names the state.
        """
        lacking = manifest.not_held(contents, self.asked())
        if lacking:
            raise ValueError(
                f"the checkpoint holds no state for {', '.join(lacking)}: it was saved without; "
                "omit the argument to start that part from its initial state"
            )
        own = self.optimizer_class()
        if own is not None and own != contents.optimizer_class:
            raise ValueError(
                f"the checkpoint holds the state of {contents.optimizer_class}, and the optimizer "
                f"is {own}"
            )
        is_powersgd = self.powersgd is not None
        if self.hook_state is not None and is_powersgd != (contents.hook == POWERSGD):
            kinds = {True: "PowerSGD's", False: "another hook's"}
            raise ValueError(
                f"the checkpoint holds {kinds[contents.hook == POWERSGD]} state, and hook_state is "
                f"{kinds[is_powersgd]}"
            )

    def require_fits(
        self,
        model: Mapping[str, object],
        shared: SharedState,
        whole: Mapping[str, Any] | None,
    ) -> None:
        """Refuse state of another model, data set or optimizer, before any of it is loaded.

        Args:
            model: Content of ``model.pt``.
            shared: Content of ``training.pt``.
            whole: Content of ``optimizer.pt``, a merged state, or a rank's shard; or None.

        Raises:
            ValueError: Names the difference.
        """
        model_state.require_fits(self.model, model)
        model_state.require_same_layouts(self.model, model)
        if (require_sampler_fits := getattr(self.sampler, "require_fits", None)) is not None:
            require_sampler_fits(shared["sampler"])
        if self.optimizer is not None and whole is not None:
            saved = [len(group["params"]) for group in whole["param_groups"]]
            own = [len(group["params"]) for group in self.optimizer.param_groups]
            if saved != own:
                raise ValueError(
                    f"the checkpoint is of another model: its optimizer's groups hold {saved} "
                    f"parameters, this optimizer's {own}"
                )
            # torch loads state of any shape, and only a later step would fail. Others' classes may
            # keep state in any form, and an OSS compares its shard itself.
            if type(self.optimizer) in state_names.NAMES:
                state_dict.require_fits(dict(whole), self.optimizer.param_groups, self.optimizer)

    def load_shared(self, model: Mapping[str, Any], shared: SharedState) -> None:
        """Load the model, scheduler, scaler and sampler. Communicates nothing."""
        model_state.bare(self.model).load_state_dict(model)
        for taker, state in (
            (self.scheduler, shared["scheduler"]),
            (self.scaler, shared["scaler"]),
            (self.sampler, shared["sampler"]),
        ):
            if taker is not None:
                taker.load_state_dict(state)

    def require_own_buffers(self, buffers: object) -> None:
        """Refuse buffers of another model.

        Raises:
            ValueError: Names the difference.
        """
        text = (
            model_state.differences(model_state.buffers(self.model), buffers)
            if isinstance(buffers, Mapping)
            else "no dict"
        )
        if text:
            raise ValueError(f"the checkpoint's own buffers of a rank are of another model: {text}")

    def load_own_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's own buffers. Communicates nothing."""
        own = dict(model_state.bare(self.model).named_buffers())
        with torch.no_grad():
            for name, saved in buffers.items():
                own[name].copy_(saved)
