"""Parameters that come, freeze, train again and move, while the sharded optimizer holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import record_function

from mpidist.comm.consistency import comparing, maximum, raising_on_all, require_same
from mpidist.comm.mpi import autograd_mode
from mpidist.dynamo import untraced
from mpidist.zero import groups
from mpidist.zero.buffer_plan import owned_parts
from mpidist.zero.flat_state import FlatState
from mpidist.zero.pieces import unchanged
from mpidist.zero.saving import Saving
from mpidist.zero.wire import Wire

Tensor = torch.Tensor
Bounds = dict[Tensor, tuple[tuple[int, int, int], ...]]
_NEW, _MOVED, _REFUSED = 1, 2, 3


@untraced
class ParameterChanges(Saving):
    """The part of the sharded optimizer that knows whose each parameter is."""

    _is_constructed: bool
    _one_copy: bool
    _wire: Wire | None

    def _prepare(self, refusal: Exception | None = None) -> None:
        """Bring in what has changed since the last step: where parameters lie, and the groups' settings.

        Args:
            refusal: Why this rank takes no step; all then raise.
        """
        shards = self._shards
        # On all ranks before any of them writes; so it also says that nobody reads the one copy any
        # more.
        own = _MOVED if shards.buffers.has_moved() else _NEW if shards.has_new() else 0
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
        """Have the buffers and the state follow the parameters to another device or dtype."""
        with comparing(self.group, "OSS.step") as rows:
            groups.require_host_memory(self.param_groups if self._one_copy else [])
            self._shards.buffers.require_shapes()
            rows += groups.rows(self.param_groups)
        same = unchanged(self._shards.pieces, self._shards.buffers.plans)
        self._shards.follow()
        self._state = FlatState()
        state = self.optim.state
        kept = {piece.tensor: state[piece.tensor] for piece in same if piece.tensor in state}
        # torch's rules for what takes the parameter's dtype and device
        self.optim.load_state_dict(self.optim.state_dict())
        self.optim.state.update(kept)  # they would round scalars to the parameter's dtype, too
        self.state = self.optim.state
        self._flatten_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which is divided among the ranks by itself.

        Collective: over the group.
        """
        if not self._is_constructed:
            super().add_param_group(param_group)
            return
        with autograd_mode.allocating(), torch.no_grad():
            self._add(param_group)

    def _add(self, param_group: dict[str, Any]) -> None:
        count = len(self.param_groups)
        try:
            with comparing(self.group, "OSS.add_param_group") as rows:
                super().add_param_group(param_group)
                groups.require_host_memory(self.param_groups[-1:] if self._one_copy else [])
                groups.require_apart(self.param_groups)
                groups.require_carried(self.param_groups[-1:], self._wire)
                rows += groups.rows(self.param_groups[-1:])
                owners, _ = self._shards.owners.choose(self.param_groups[-1]["params"])
                rows.append(("owners", owners))
        except Exception:
            del self.param_groups[count:]
            raise
        new = self.param_groups[-1:]
        # what a scheduler has set since the last step
        groups.sync(self.param_groups[:-1], self.optim.param_groups)
        own = self._shards.add(new[0]["params"])
        self._shards.make()
        if not self._shards.steps_parameters:
            own = [
                piece
                for piece in self._shards.pieces
                if piece.number >= len(self._shards.parameters) - len(new[0]["params"])
            ]
        with raising_on_all(self.group, "OSS.add_param_group"):
            self.optim.add_param_group(
                {**groups.settings(new[0]), "params": [piece.tensor for piece in own]}
            )
        self._shards.place_parameters()
        groups.sync(self.optim.param_groups, self.param_groups)
        self._flatten_state()

    def refresh_trainable(self) -> None:
        """Take note of parameters that were frozen or that train again (``requires_grad``).

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

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Return for each rank its groups: settings, and in ``params`` the parameters that it owns.

        Of a parameter that is cut, ``params`` holds vectors of the elements.
        """
        spans = self.bounds() if self._shards.steps_parameters is False else {}
        number = 0
        found: list[list[dict[str, Any]]] = [[] for _ in range(self.world_size)]
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
        """Return for each trainable parameter its owners: (rank, start, stop) in elements, in the order in which they lie."""
        shards = self._shards
        spans = owned_parts(shards.buffers.plans)
        return {shards.parameters[number]: parts for number, parts in spans.items()}
