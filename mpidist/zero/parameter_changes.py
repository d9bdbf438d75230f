"""Changes of a sharded optimizer's parameters: new groups, freezing, other devices or dtypes."""

from __future__ import annotations

import torch
from torch.profiler import record_function

from mpidist import state_scalars
from mpidist.comm.consistency import comparing, maximum, raising_on_all, require_same
from mpidist.comm.mpi import autograd_mode
from mpidist.dynamo import untraced
from mpidist.zero import groups
from mpidist.zero.buffer_plan import owned_parts
from mpidist.zero.flat_state import FlatState
from mpidist.zero.groups import ParamGroup
from mpidist.zero.pieces import unchanged
from mpidist.zero.saving import Saving
from mpidist.zero.wire import Wire

Tensor = torch.Tensor
Bounds = dict[Tensor, tuple[tuple[int, int, int], ...]]
_NEW, _MOVED, _REFUSED = 1, 2, 3


@untraced
class ParameterChanges(Saving):
    """Parameter changes of the sharded optimizer, detected at each step or made by a call."""

    _one_copy: bool
    _wire: Wire | None

    def _prepare(self, refusal: Exception | None = None) -> None:
        """Follow changes of the parameters' memory and the groups' settings since the last step.

        Collective: over the group.

        Args:
            refusal: This rank's reason to take no step; all ranks then raise.
        """
        shards = self._shards
        # Also a barrier: no rank still reads the one copy when the first rank writes.
        own = _MOVED if shards.has_moved() else _NEW if shards.has_new() else 0
        changed = maximum(self.group, own if refusal is None else _REFUSED)
        if changed == _REFUSED:
            require_same(self.group, "OSS.step", (), refusal)
        if changed == _MOVED:
            with record_function("mpidist::oss::follow"):
                self._follow()
        if changed:
            self._refresh("OSS.step")
        shards.masters.renew(shards.pieces)
        groups.sync(self.param_groups, self.optim.param_groups)

    def _follow(self) -> None:
        """Move the buffers and the state to the parameters' new device or dtype.

        Collective: over the group.
        """
        with comparing(self.group, "OSS.step") as rows:
            groups.require_host_memory(self.param_groups if self._one_copy else [])
            self._shards.require_shapes()
            rows += groups.rows(self.param_groups)
        same = unchanged(self._shards.pieces, self._shards.plans)
        self._shards.follow()
        self._state = FlatState()
        state = self.optim.state
        kept = {piece.tensor: state[piece.tensor] for piece in same if piece.tensor in state}
        # load_state_dict converts state by torch's rules; unchanged pieces keep their own.
        held = self.optim.state_dict()
        self.optim.load_state_dict(held)
        state_scalars.restore(self.optim, held)
        self.optim.state.update(kept)
        self.state = self.optim.state
        self._flatten_state()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters; its parameters are divided among the ranks separately.

        Collective: over the group.
        """
        if not self._is_constructed:
            super().add_param_group(param_group)
            return
        with autograd_mode.allocating(), torch.no_grad():
            self._add(param_group)

    def _add(self, param_group: ParamGroup) -> None:
        count = len(self.param_groups)
        try:
            with comparing(self.group, "OSS.add_param_group") as rows:
                super().add_param_group(param_group)
                groups.require_host_memory(self.param_groups[-1:] if self._one_copy else [])
                groups.require_distinct(self.param_groups)
                # All groups: other parameters may train again since the last step.
                groups.require_carried(self.param_groups, self._wire)
                rows += groups.rows(self.param_groups)
                owners, _ = self._shards.owners.choose(self.param_groups[-1]["params"])
                rows.append(("owners", owners))
        except Exception:
            del self.param_groups[count:]
            raise
        new = self.param_groups[-1]
        # A scheduler may have changed settings since the last step.
        groups.sync(self.param_groups[:-1], self.optim.param_groups)
        made = self._shards.add(new["params"]) + self._shards.make()
        *earlier, own = groups.by_group(self.param_groups, made)
        for group, tensors in zip(self.optim.param_groups, earlier, strict=True):
            group["params"] += tensors
        with raising_on_all(self.group, "OSS.add_param_group"):
            self.optim.add_param_group({**groups.settings(new), "params": own})
        self._shards.place_parameters()
        groups.sync(self.optim.param_groups, self.param_groups)
        self._flatten_state()
        self._restore_unowned()

    def refresh_trainable(self) -> None:
        """Follow changes of ``requires_grad``: parameters that were frozen, or train again.

        Collective: over the group.
        """
        with autograd_mode.allocating(), torch.no_grad():
            self._prepare()
            self._refresh("OSS.refresh_trainable")

    def _refresh(self, where: str) -> None:
        with comparing(self.group, where) as rows:
            groups.require_carried(self.param_groups, self._wire)
            rows += groups.rows(self.param_groups)
        shards = self._shards
        shards.refresh()
        made = shards.make()
        for place, tensors in enumerate(groups.by_group(self.param_groups, made)):
            self.optim.param_groups[place]["params"] += tensors
        shards.place_parameters()
        self._flatten_state()
        self._restore_unowned()

    def partition_parameters(self) -> list[list[ParamGroup]]:
        """Return each rank's groups: settings, and in ``params`` the parameters that the rank owns.

        A cut parameter is in ``params`` as vectors of its elements.
        """
        spans = self.bounds() if self._shards.steps_parameters is False else {}
        number = 0
        found: list[list[ParamGroup]] = [[] for _ in range(self.world_size)]
        for group in self.param_groups:
            held: list[list[Tensor]] = [[] for _ in range(self.world_size)]
            for parameter in group["params"]:
                if parameter in spans and len(spans[parameter]) > 1:
                    flat = parameter.detach().as_strided(
                        (parameter.numel(),), (1,), parameter.storage_offset()
                    )
                    for rank, start, stop in spans[parameter]:
                        held[rank].append(flat[start:stop])
                else:
                    owner = (
                        spans[parameter][0][0]
                        if parameter in spans
                        else self._shards.owners[number]
                    )
                    held[owner].append(parameter)
                number += 1
            for rank, params in enumerate(held):
                found[rank].append({**groups.settings(group), "params": params})
        return found

    def bounds(self) -> Bounds:
        """Return the owners of each trainable parameter's elements: (rank, start, stop).

        Elements are counted in the order of their memory.
        """
        shards = self._shards
        spans = owned_parts(shards.plans)
        return {shards.parameters[number]: parts for number, parts in spans.items()}
