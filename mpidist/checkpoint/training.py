"""State of a training run: its files, and the objects that the state is loaded into.

``model.pt``: the bare module's, once. ``optimizer.pt``: an ordinary optimizer's, once.
``training.pt``: scheduler, scaler, sampler, buckets, the user's own data. ``rank-<r>-of-<W>.pt``: a
rank's generators, its shard of an ``OSS``, its buffers and hook state. ``powersgd-<r>-of-<W>.pt``:
PowerSGD's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.checkpoint import manifest, model_state, rng
from mpidist.checkpoint.manifest import MODEL, OPTIMIZER, TRAINING, Contents
from mpidist.checkpoint.plain_data import require_plain
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.zero import state_dict

WHOLE, SHARDS = "whole", "shards"
POWERSGD, STATE = "powersgd", "state"


@dataclass(frozen=True)
class Training:
    """Objects of a run that have state; all but the model may be None."""

    model: Any
    optimizer: Any = None
    hook_state: Any = None
    sampler: Any = None
    scheduler: Any = None
    scaler: Any = None

    def asked(self) -> dict[str, Any]:
        """Return the optional objects by their argument names in ``save`` and ``load``."""
        names = ("optimizer", "hook_state", "sampler", "scheduler", "scaler")
        return {name: getattr(self, name) for name in names}

    def is_sharded(self) -> bool:
        """Return whether the optimizer's state is divided among the ranks."""
        return hasattr(self.optimizer, "rank_local_state_dict")

    def is_powersgd(self) -> bool:
        """Return whether the hook state is PowerSGD's, which has files of its own."""
        return isinstance(self.hook_state, PowerSGDState)

    def require_usable(self, rank: int, world_size: int) -> None:
        """Refuse objects whose state cannot be saved.

        Raises:
            TypeError: An object of another class.
            ValueError: A sharded optimizer over other ranks; PowerSGD's state without mpidist's
                DistributedDataParallel.
        """
        if not isinstance(model_state.bare(self.model), torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(self.model).__name__}")
        for name, taker in self.asked().items():
            if name == "hook_state" and self.is_powersgd():
                continue
            if taker is not None and not (
                hasattr(taker, "state_dict") and hasattr(taker, "load_state_dict")
            ):
                hint = (
                    " (of mpidist's hooks PowerSGDState alone has state)"
                    if name == "hook_state"
                    else ""
                )
                raise TypeError(
                    f"{name} must have state_dict() and load_state_dict(); {type(taker).__name__} "
                    f"has not{hint}"
                )
        if self.is_sharded() and (self.optimizer.rank, self.optimizer.world_size) != (
            rank,
            world_size,
        ):
            raise ValueError(
                f"the sharded optimizer is of rank {self.optimizer.rank} of "
                f"{self.optimizer.world_size}, and the checkpoint's "
                f"group has rank {rank} of {world_size}: give group= the optimizer's"
            )
        if self.is_powersgd() and model_state.data_parallel(self.model) is None:
            raise ValueError(
                "a PowerSGDState is saved with the mpidist.ddp.DistributedDataParallel that it "
                "serves: give that as model"
            )

    def optimizer_class(self) -> str | None:
        """Return the class name of the optimizer that steps; None without an optimizer."""
        if self.optimizer is None:
            return None
        return type(self.optimizer.optim if self.is_sharded() else self.optimizer).__name__

    # --- to files ---

    def contents(self, with_rng: bool) -> Contents:
        """Return the kinds of state of this run; equal on all ranks."""
        return Contents(
            optimizer=None if self.optimizer is None else SHARDS if self.is_sharded() else WHOLE,
            optimizer_class=self.optimizer_class(),
            hook=None if self.hook_state is None else POWERSGD if self.is_powersgd() else STATE,
            scheduler=self.scheduler is not None,
            scaler=self.scaler is not None,
            sampler=self.sampler is not None,
            rng=with_rng,
            buffers=model_state.keeps_own_buffers(self.model),
        )

    def files(self, contents: Contents, extra: Any, rank: int, world_size: int) -> dict[str, Any]:
        """Return the content of one rank's files, by file name.

        Raises:
            TypeError: A state is not plain data.
        """
        require_plain("extra", extra)  # checked on all ranks, written by rank 0
        if self.is_sharded() and hasattr(self.optimizer, "wait"):
            self.optimizer.wait()  # for parameters in transit
        content: dict[str, Any] = {}
        if rank == 0:
            content[MODEL] = model_state.packed(model_state.bare(self.model).state_dict())
            content[TRAINING] = self._shared(extra)
            if contents.optimizer == WHOLE:
                content[OPTIMIZER] = self.optimizer.state_dict()
        if manifest.has_rank_files(contents):
            content[manifest.rank_file(rank, world_size)] = self._own(contents)
        for name, value in content.items():
            require_plain(f"the content of {name}", value)
        return content

    def _shared(self, extra: Any) -> dict[str, Any]:
        wrapper = model_state.data_parallel(self.model)
        return {
            **{name: _state_of(getattr(self, name)) for name in ("scheduler", "scaler", "sampler")},
            "buckets": None if wrapper is None else wrapper.bucket_plan(),
            "extra": extra,
        }

    def _own(self, contents: Contents) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.rank_local_state_dict(copies=False)
            if contents.optimizer == SHARDS
            else None,
            "hook": self.hook_state.state_dict() if contents.hook == STATE else None,
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
        if self.hook_state is not None and self.is_powersgd() != (contents.hook == POWERSGD):
            kinds = {True: "PowerSGD's", False: "another hook's"}
            raise ValueError(
                f"the checkpoint holds {kinds[contents.hook == POWERSGD]} state, and hook_state is "
                f"{kinds[self.is_powersgd()]}"
            )

    def require_fits(self, model: Any, shared: Any, whole: Any) -> None:
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
        if hasattr(self.sampler, "require_fits"):
            self.sampler.require_fits(shared["sampler"])
        if whole is not None:
            saved = [len(group["params"]) for group in whole["param_groups"]]
            own = [len(group["params"]) for group in self.optimizer.param_groups]
            if saved != own:
                raise ValueError(
                    f"the checkpoint is of another model: its optimizer's groups hold {saved} "
                    f"parameters, this optimizer's {own}"
                )
            # torch loads state of any shape, and only a later step would fail.
            if state_dict.is_known(self.optimizer):
                state_dict.require_fits(whole, self.optimizer.param_groups, self.optimizer)

    def load_shared(self, model: Any, shared: Mapping[str, Any]) -> None:
        """Load the model, scheduler, scaler and sampler. Communicates nothing."""
        model_state.bare(self.model).load_state_dict(model)
        for name in ("scheduler", "scaler", "sampler"):
            if getattr(self, name) is not None:
                getattr(self, name).load_state_dict(shared[name])

    def require_own_buffers(self, buffers: Any) -> None:
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

    def load_powersgd(self, loaded: PowerSGDState) -> None:
        """Copy a loaded state into the hook's state object, which keeps its group.

        The object may be registered with the module already.
        """
        self.hook_state.load_state_dict(loaded.state_dict())


SHARED_NAMES = ("scheduler", "scaler", "sampler", "buckets", "extra")
OWN_NAMES = ("optimizer", "hook", "buffers", "rng")


def require_names(file: str, held: Mapping[str, Any], names: Sequence[str]) -> None:
    """Require the names in a file's dict.

    Raises:
        ValueError: A name is missing.
    """
    lacking = [name for name in names if name not in held]
    if lacking:
        raise ValueError(f"{file} is damaged: it holds no {', '.join(lacking)}")


def _state_of(taker: Any) -> Any:
    read: Callable[[], Any] | None = getattr(taker, "state_dict", None)
    return None if read is None else read()
