"""State dicts of the sharded optimizer: brought together from all ranks, and loaded by each for its shard."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import record_function

from mpidist.zero import groups, state_dict
from mpidist.zero.consolidation import CHUNK_BYTES, Consolidation
from mpidist.zero.flat_state import FlatState
from mpidist.zero.shards import Shards
from mpidist.zero.verdict import raise_together, require_alike


class Saving(torch.optim.Optimizer):
    """The part of the sharded optimizer that saves and loads.

    Attributes:
        optim: The base optimizer of this rank.
        group: Native group.
        rank: Of this process in the group.
        world_size: W, ranks of the group.
    """

    optim: torch.optim.Optimizer
    group: Any
    rank: int
    world_size: int
    _shards: Shards
    _state: FlatState
    _consolidation: Consolidation

    def consolidate_state_dict(self, recipient_rank: int = 0, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Bring all ranks' state to one, for its ``state_dict``. Other ranks allocate at most one chunk.

        Collective: over the group.

        Blocks: until the state has left this rank, and on the recipient until it is there.

        Args:
            recipient_rank: Rank in the group; -1 for all.
            chunk_bytes: Longest message.

        Raises:
            ValueError: ``recipient_rank`` is out of range, or ``chunk_bytes`` not positive.
        """
        if isinstance(recipient_rank, bool) or not isinstance(recipient_rank, int) or not -1 <= recipient_rank < self.world_size:
            raise ValueError(f"recipient_rank is a rank from 0 to {self.world_size - 1}, or -1 for all; got {recipient_rank!r}")
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be positive; got {chunk_bytes}")
        groups.sync(self.param_groups, self.optim.param_groups)
        self._settle()
        with record_function("mpidist::oss::consolidate"):
            self._consolidation.run(self._shards, self._state, self.optim.state, recipient_rank, chunk_bytes)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return the state as ``optim`` over all parameters on one rank would.

        Args:
            all_ranks: First consolidate on all ranks; collective over the group. Otherwise it is the state of the last
                ``consolidate_state_dict``, on its recipient.

        Raises:
            RuntimeError: The state was not consolidated on this rank.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if all_ranks:
            self.consolidate_state_dict(-1)
        result = state_dict.packed(self.param_groups, self._consolidation.result(self.rank))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            if changed is not None:
                result = changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of any world size: of this class, of FairScale's, or of ``optim`` over all parameters.

        The argument stays as it is. All ranks give the same.

        Collective: over the group.

        Raises:
            ValueError: It is of another model or of another class of optimizers; nothing has been loaded (all ranks).
            DisagreementError: Another rank refused, or ranks give different settings.
        """
        self._load(state_dict)

    def _load(self, given: dict[str, Any]) -> None:
        error: Exception | None = None
        rows: list[tuple[str, Any]] = []
        before = (self.optim.state, self.optim.param_groups)
        try:
            given = dict(given)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, given)
                given = given if changed is None else changed
            state_dict.require_fits(given, self.param_groups, self.optim)
            rows = [("group", groups.text(group)) for group in given["param_groups"]]
        except Exception as raised:
            error = raised
        require_alike(self.group, "OSS.load_state_dict", rows, error)
        try:
            local = state_dict.local(given, self.param_groups, self.optim.param_groups, self._shards.pieces)
            self.optim.load_state_dict(local)
        except Exception as raised:
            error = raised
            self.optim.__setstate__({"state": before[0], "param_groups": before[1]})
        raise_together(self.group, "OSS.load_state_dict", error)
        self.state = self.optim.state
        self._settle()
        state_dict.take_settings(self.optim.param_groups, given["param_groups"], self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _settle(self) -> None:
        self._state.settle(self._shards.pieces, self.optim.state, self._shards.shard_sizes())
