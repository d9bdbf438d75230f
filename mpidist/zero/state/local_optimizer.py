"""Base optimizer of one rank: it steps the pieces of this rank's shards, and holds their state.

A parameter that is frozen from the beginning has no piece where parameters are cut or have master
copies. Its loaded state is *deferred*: one rank keeps it until the parameter has a place, so that
it is not lost at the next save.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mpidist import state_names, state_scalars
from mpidist.comm.consistency import raising_on_all
from mpidist.comm.memory import host_values
from mpidist.zero.shards import groups as parameter_groups
from mpidist.zero.shards.groups import ParamGroup
from mpidist.zero.shards.pieces import Piece
from mpidist.zero.shards.shards import Shards
from mpidist.zero.state import state_dict
from mpidist.zero.state.flat_state import FlatState, ParamState
from mpidist.zero.state.shard_state import (
    MASTER_KIND,
    ShardState,
    StateByNumber,
    entries_of,
    forms_of,
)

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

Tensor = torch.Tensor
StateOfTensors: TypeAlias = defaultdict[Tensor, ParamState]


class StateOfShard(defaultdict[Tensor, ParamState]):
    """State of one rank's shard, which counts as true also without entries.

    Whether this rank has state says nothing of the others. torch.distributed.checkpoint lets an
    optimizer whose state is false take a step, which ranks without parameters would begin alone.
    """

    def __bool__(self) -> bool:
        return True


class LocalOptimizer:
    """Base optimizer over the pieces of one rank; element-wise state is in flat tensors.

    Collective: constructed by all ranks of the shards' group, after ``Shards.make``.

    Args:
        kind: Class of the base optimizer.
        defaults: Its arguments.
        groups: Of all parameters; the sharded optimizer's own list.
        shards: The sharded optimizer's.

    Attributes:
        optim: The base optimizer. Its ``state`` is one dict for its whole life.
        flat: Its flat state.
        deferred: The rank that keeps the state of each parameter without a piece, by number; equal
            on all ranks.

    Raises:
        Exception: The constructor's, on all ranks.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        groups: list[ParamGroup],
        shards: Shards,
    ) -> None:
        self.flat = FlatState()
        self.deferred: dict[int, int] = {}
        self._deferred_state: StateByNumber = {}  # that this rank keeps
        self._groups = groups
        self._shards = shards
        with raising_on_all(shards.group, f"OSS({kind.__name__})"):
            own = parameter_groups.by_group(groups, shards.pieces)
            base_groups = [
                {**parameter_groups.settings(group), "params": tensors}
                for group, tensors in zip(groups, own, strict=True)
            ]
            self.optim = kind(base_groups, **defaults)
            self.optim.state = StateOfShard(dict, self.optim.state)

    # --- parameters ---

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Add new pieces to the base optimizer's groups, and the group that it lacks, if any.

        Collective: over the group, where there is a new group.

        Raises:
            Exception: The base optimizer's, on all ranks.
        """
        own = parameter_groups.by_group(self._groups, pieces)
        present = self.optim.param_groups
        for group, tensors in zip(present, own, strict=False):
            group["params"] += tensors
        if len(own) > len(present):
            with raising_on_all(self._shards.group, "OSS.add_param_group"):
                new = parameter_groups.settings(self._groups[-1])
                self.optim.add_param_group({**new, "params": own[-1]})

    def convert(self, unchanged: Iterable[Piece]) -> None:
        """Convert state to the pieces' present devices and dtypes, by torch's rules.

        Args:
            unchanged: Pieces that keep their state.
        """
        state = self.optim.state
        kept = {piece.tensor: state[piece.tensor] for piece in unchanged if piece.tensor in state}
        self.flat = FlatState()
        self._convert()
        state.update(kept)
        self.flatten()

    # --- state ---

    def flatten(self) -> None:
        """Move element-wise state into the flat tensors."""
        self.flat.flatten(self._shards.pieces, self.optim.state, self._shards.sizes())

    def state(self) -> ShardState:
        """Return the state; its tensors are the optimizer's own. Communicates nothing.

        Raises:
            TypeError: The base optimizer keeps state that no parameter has, which no rank owns.
        """
        for key in self.optim.state:
            if not isinstance(key, torch.Tensor):
                raise TypeError(
                    f"{type(self.optim).__name__} keeps state under {key!r}, which is no "
                    "parameter: each rank has its own, and none can be saved for all. Let it keep "
                    "such state in its parameter groups"
                )
        self.flatten()
        shards, kinds = self._shards, self.flat.kinds
        shards.masters.renew_written(shards.pieces)
        return ShardState(
            rank=shards.group.rank,
            groups=parameter_groups.packed(self._groups),
            kinds=tuple((kind.buffer, kind.name, kind.dtype) for kind in kinds),
            flats=tuple(kinds.values()),
            entries=entries_of(shards.pieces, self.flat, self.optim.state, self._deferred_state),
            masters=tuple(shards.masters.flats),
            deferred=dict(self.deferred),
            plans=tuple(shards.plans),
            forms=forms_of(shards.parameters),
        )

    def replace_state(self, state: Mapping[Tensor, ParamState]) -> None:
        """Take other state in the place of the base optimizer's. Communicates nothing."""
        given = dict(state)
        self.optim.state.clear()
        self.optim.state.update(given)
        self.flat = FlatState()
        self.flatten()

    def load(self, where: str, read: Callable[[], ShardState]) -> None:
        """Load a state on all ranks, or on none if it cannot be read or loaded on one.

        Collective: over the group.

        Args:
            where: The method, for the message.
            read: Return the state of this rank, which is copied.
        """
        state, settings = self.optim.state, self.optim.param_groups
        try:
            with raising_on_all(self._shards.group, where):
                given = read()
                state_names.require_complete(
                    type(self.optim),
                    self.optim.defaults,
                    parameter_groups.packed(given.groups),
                    {key: held.keys() - {MASTER_KIND} for key, held in given.entries.items()},
                )
                deferred, kept = dict(given.deferred), _deferred_part(given)
                state_scalars.load(self.optim, self._base_state_dict(given))
        except Exception:
            self.optim.__setstate__({"state": state, "param_groups": settings})
            raise
        self._keep(state)
        self.deferred, self._deferred_state = deferred, kept
        self.flat = FlatState(spare=self.flat.kinds)  # frees kinds that were not loaded
        self.flatten()
        parameter_groups.take_loaded(self.optim.param_groups, given.groups, self._groups)
        self._load_masters(given)

    def restore_deferred(self) -> None:
        """Restore deferred state of parameters that have got a place since the load.

        Collective: over the group.
        """
        placed = self._shards.stepped_numbers()
        found = [number for number in sorted(self.deferred) if number in placed]
        for number in found:
            kept = self._deferred_state.pop(number, None)
            held = self._shards.group.broadcast_object(kept, self.deferred.pop(number))
            for piece in self._shards.pieces:
                if piece.number == number:
                    self.optim.state[piece.tensor] = {
                        name: owned(state_dict.part(value, piece), piece)
                        for name, value in held.items()
                    }
        if found:
            self._convert()
            self.flatten()

    def _convert(self) -> None:
        """Convert the state by torch's rules for the pieces' devices and dtypes."""
        state = self.optim.state
        state_scalars.load(self.optim, self.optim.state_dict())
        self._keep(state)

    def _keep(self, state: StateOfTensors) -> None:
        """Move the content of the dict that torch has made in a load into the former one."""
        loaded = dict(self.optim.state)
        state.clear()
        state.update(loaded)
        self.optim.state = state

    def _base_state_dict(self, given: ShardState) -> StateDict:
        """Return a state dict for the base optimizer, by its own numbers."""
        by_tensor = {id(piece.tensor): piece for piece in self._shards.pieces}
        result = parameter_groups.packed(
            [
                {**parameter_groups.settings(saved), "params": base["params"]}
                for saved, base in zip(given.groups, self.optim.param_groups, strict=True)
            ]
        )
        state: StateByNumber = {}
        tensors = (tensor for base in self.optim.param_groups for tensor in base["params"])
        for number, tensor in enumerate(tensors):
            piece = by_tensor[id(tensor)]
            held = given.held_by(piece)
            if held is None:
                continue
            found = {
                name: owned(value, piece) for name, value in held.items() if name != MASTER_KIND
            }
            if found or not held:  # a master alone is no state
                state[number] = found
        return {"state": state, "param_groups": result}

    def _load_masters(self, given: ShardState) -> None:
        masters = self._shards.masters
        if not masters.flats:
            return
        for piece in self._shards.pieces:
            held = given.held_by(piece)
            if held and MASTER_KIND in held and piece.home is not None:
                value = held[MASTER_KIND]
                assert isinstance(value, torch.Tensor)
                masters.load(piece, value)


def owned(value: object, piece: Piece) -> object:
    """Return a value that steps may change: a copy, unless it is copied into a flat tensor."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value if FlatState.belongs(value, piece) else value.clone()


def _deferred_part(given: ShardState) -> StateByNumber:
    """Return copies of a state's deferred entries, in host memory."""
    return {
        number: {
            name: host_values.copy_of(value) if torch.is_tensor(value) else copy.deepcopy(value)
            for name, value in given.entries[number].items()
        }
        for number in given.deferred
        if number in given.entries
    }
