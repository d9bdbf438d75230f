"""Loading of the sharded optimizer: each rank loads its shard; all ranks load or none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpidist import state_scalars
from mpidist.comm.consistency import comparing, raising_on_all
from mpidist.comm.group_types import Group
from mpidist.comm.mpi import autograd_mode
from mpidist.dynamo import untraced
from mpidist.zero import groups, local_state
from mpidist.zero import state_dict as state_dicts
from mpidist.zero.flat_state import FlatState
from mpidist.zero.groups import Groups
from mpidist.zero.local_state import RankLocalState
from mpidist.zero.master_weights import elements_of
from mpidist.zero.shard_image import ShardImage, image_of
from mpidist.zero.shards import Shards
from mpidist.zero.state_dict import MASTER, SEEN, StateByNumber
from mpidist.zero.unowned_state import UnownedState, unowned_part

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


@untraced
class Loading(torch.optim.Optimizer):
    """State loading of the sharded optimizer.

    Attributes:
        optim: The base optimizer of this rank.
        group: Native group.
        rank: Of this process in the group.
        world_size: W, ranks of the group.
    """

    optim: torch.optim.Optimizer
    group: Group
    rank: int
    world_size: int
    _shards: Shards
    _state: FlatState
    _unowned: UnownedState

    def load_state_dict(self, state_dict: StateDict | RankLocalState) -> None:
        """Load a state dict of any world size, in the format of torch, FairScale or this class.

        All ranks pass the same state, or each its own ``rank_local_state_dict``. The argument is
        not changed.

        The parameters may be loaded before or after. With a wire, the next step compares them with
        the state's master copies, and renews those of other parameters; so does a state without
        masters for parameters that were written.

        Collective: over the group.

        Raises:
            ValueError: The state is of another model, class of optimizers or layout; nothing has
                been loaded (all ranks).
            DisagreementError: Another rank refused, or ranks give different settings; nothing has
                been loaded.
        """
        with autograd_mode.allocating(), torch.no_grad():
            self._load(state_dict)

    def load_sharded_state_dict(self, state_dict: StateDict) -> None:
        """Load a ``sharded_state_dict`` after ``torch.distributed.checkpoint.load`` has filled it.

        Collective: over the group.

        Raises:
            ValueError: The state is of another model or class of optimizers; nothing has been
                loaded (all ranks).
            DisagreementError: Another rank refused, or ranks have different settings.
        """
        from mpidist.zero import checkpoint

        where = "OSS.load_sharded_state_dict"
        pieces = self._shards.pieces
        with comparing(self.group, where) as rows:
            plain = checkpoint.as_torch(state_dict, self.param_groups)
            state_dicts.require_fits(plain, self.param_groups, self.optim)
            rows += [("group", groups.text(group)) for group in plain["param_groups"]]
        names = checkpoint.names_of(self.param_groups)
        held = {
            number: dict(state_dict["state"].get(names[number], old))
            for number, old in self._unowned.held.items()
        }
        self._install(
            where,
            lambda: checkpoint.restored(
                state_dict, pieces, self.param_groups, self.optim.param_groups
            ),
            plain["param_groups"],
            UnownedState(self._unowned.owners, held),
        )
        self._load_masters(
            checkpoint.masters_in(state_dict, self._shards.pieces, self.param_groups)
        )

    def _load_masters(self, masters: StateByNumber) -> None:
        """Load master copies of this rank's pieces, by parameter number."""
        copies = self._shards.masters
        if not copies.flats:
            return
        with torch.no_grad():
            for piece in self._shards.pieces:
                held = masters.get(piece.number)
                if held and piece.home is not None:
                    value, seen = held[MASTER], held.get(SEEN)
                    assert isinstance(value, torch.Tensor)
                    copies.load(piece, value, seen.clone() if torch.is_tensor(seen) else None)

    def _load(self, given: Any) -> None:
        where = "OSS.load_state_dict"
        is_local = local_state.is_rank_local(given)
        unowned_there = UnownedState()
        with comparing(self.group, where) as rows:
            given = dict(given) if isinstance(given, Mapping) else given
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, given)
                given = given if changed is None else changed
            rows.append(("rank-local", is_local))
            if is_local:
                local_state.require_fits(given, self._image(), self.world_size)
                unowned_there = local_state.unowned_in(given)
            else:
                state_dicts.require_fits(given, self.param_groups, self.optim)
                rows.append(("state of", state_dicts.summary(given)))
            rows += [("group", groups.text(group)) for group in given["param_groups"]]
        pieces, base = self._shards.pieces, self.optim.param_groups
        if is_local:
            self._install(
                where,
                lambda: local_state.restored(given, pieces, base),
                given["param_groups"],
                unowned_there,
            )
            self._load_masters(self._masters_in(given))
        else:
            self._install(
                where,
                lambda: state_dicts.local(given, self.param_groups, base, pieces),
                given["param_groups"],
                unowned_part(
                    state_dicts.by_number(given, self.param_groups), self._shards, self.rank
                ),
            )
            masters = state_dicts.by_number(given, self.param_groups, state_dicts.MASTERS)
            self._load_masters(
                {
                    piece.number: {
                        name: state_dicts.part(value, piece)
                        for name, value in masters[piece.number].items()
                    }
                    for piece in self._shards.pieces
                    if piece.number in masters
                }
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _install(
        self,
        where: str,
        local: Callable[[], StateDict],
        saved_groups: Groups,
        unowned: UnownedState,
    ) -> None:
        """Load a part of the state into each rank's base optimizer, on all ranks or on none.

        Collective: over the group.
        """
        before = (self.optim.state, self.optim.param_groups)
        try:
            with raising_on_all(self.group, where):
                given = local()
                self.optim.load_state_dict(given)
                state_scalars.restore(self.optim, given)
        except Exception:
            self.optim.__setstate__({"state": before[0], "param_groups": before[1]})
            raise
        self.state = self.optim.state
        self._unowned = unowned
        self._state = FlatState(spare=self._state.kinds)  # frees kinds that were not loaded
        self._flatten_state()
        state_dicts.take_settings(self.optim.param_groups, saved_groups, self.param_groups)

    def _restore_unowned(self) -> None:
        """Restore unowned state of parameters that have got a place since the load.

        Collective: over the group.
        """
        if self._unowned.hand_over(self.group, self._shards, self.optim.state):
            # Converts dtype and device by torch's rules.
            held = self.optim.state_dict()
            self.optim.load_state_dict(held)
            state_scalars.restore(self.optim, held)
            self.state = self.optim.state
            self._flatten_state()

    def _masters_in(self, given: RankLocalState) -> StateByNumber:
        found = local_state.masters_in(given, self._shards.pieces)
        if self._shards.masters.saves_seen and not given.get("seen"):
            # Of an earlier version: the parameters, loaded before, are taken for those of the save.
            for piece in self._shards.pieces:
                if piece.number in found:
                    found[piece.number][SEEN] = elements_of(piece)
        return found

    def _image(self) -> ShardImage:
        self._flatten_state()
        self._shards.masters.renew_written(self._shards.pieces)
        return image_of(self._shards, self._state, self.optim.state, self._unowned.held, self.rank)

    def _flatten_state(self) -> None:
        self._state.flatten(self._shards.pieces, self.optim.state, self._shards.sizes())
