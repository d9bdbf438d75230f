"""Local optimizers on the owners of a distributed optimizer's parameters, called by RPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mpidist.optim import local
from mpidist.optim.layout import Layout
from mpidist.optim.local_optimizer import LocalOptimizer
from mpidist.optim.owner_calls import call_all, raise_for, start_all
from mpidist.optim.param_groups import Group, by_owner
from mpidist.optim.registry import FunctionalClass
from mpidist.rpc.rref import RRef
from mpidist.rpc.worker import WorkerInfo


class RemoteOptimizers:
    """Local optimizers on all owners, each over the groups in which its owner has parameters.

    A method calls all owners that it concerns at the same time, waits for the last answer, and
    raises their errors as one ``WorkerErrors``.

    Attributes:
        references: The local optimizers, by owner.
        layout: The numbers of all parameters.

    Args:
        named: The class, or the name of one in ``mpidist.optim.functional``.
        is_functional: The class's ``step`` takes gradients.
        args: The class's further arguments.
        kwargs: The class's further arguments.
    """

    def __init__(
        self,
        named: str | FunctionalClass | type[torch.optim.Optimizer],
        is_functional: bool,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self.references: dict[WorkerInfo, RRef[LocalOptimizer]] = {}
        self.layout: Layout[WorkerInfo] = Layout()
        self._recipe = named, is_functional, args, kwargs

    def make(self, groups: Sequence[Group]) -> tuple[list[dict[str, object]], dict[str, object]]:
        """Make the local optimizers; return each group's settings, and the class's defaults.

        Raises:
            ValueError: An owner's answer does not fit its references.
        """
        own: dict[WorkerInfo, list[Group]] = {}
        for rrefs, settings in groups:
            for worker, part in by_owner(rrefs).items():
                own.setdefault(worker, []).append((part, settings))
        made = call_all(
            f"DistributedOptimizer({self._recipe[0]!r})",
            local.make,
            {worker: self._make_arguments(parts) for worker, parts in own.items()},
        )
        self.references = {worker: reference for worker, (reference, *_) in made.items()}
        # An answer has one entry for each group in which its owner has parameters.
        for worker, (_, counts, told, _) in made.items():
            if {len(counts), len(told)} != {len(own[worker])}:
                raise ValueError(
                    f"{worker} tells the parameters of {len(counts)} groups and the settings of "
                    f"{len(told)}, and has part in {len(own[worker])}"
                )
        parts = {
            worker: zip(counts, settings, strict=True)
            for worker, (_, counts, settings, _) in made.items()
        }
        found = []
        for rrefs, _ in groups:
            found.append(
                self._append(rrefs, {worker: next(parts[worker]) for worker in by_owner(rrefs)})
            )
        return found, next(iter(made.values()))[3]

    def add(self, group: Group) -> dict[str, object]:
        """Add a group, with a new local optimizer where an owner has none; return its settings.

        Raises:
            WorkerErrors: An owner refused; no owner then has the group.
        """
        rrefs, settings = group
        own = by_owner(rrefs)
        present = {
            worker: (self.references[worker], part, settings)
            for worker, part in own.items()
            if worker in self.references
        }
        absent = {
            worker: self._make_arguments([(part, settings)])
            for worker, part in own.items()
            if worker not in self.references
        }
        added, errors = start_all(local.add_group, present)
        made, more = start_all(local.make, absent)
        if errors or more:
            start_all(local.remove_group, {worker: (self.references[worker],) for worker in added})
        raise_for("DistributedOptimizer.add_param_group", {**errors, **more}, len(own))
        parts = dict(added)
        for worker, (reference, (counts,), (own_settings,), _) in made.items():
            self.references[worker] = reference
            parts[worker] = counts, own_settings
        return self._append(rrefs, parts)

    def step(self, context_id: int, changes: Mapping[int, dict[str, object]]) -> None:
        """Update the parameters with a context's gradients, after changes of groups' settings."""
        calls = {
            worker: (reference, context_id, self._own(worker, changes) if changes else {})
            for worker, reference in self.references.items()
        }
        call_all("DistributedOptimizer.step", local.step, calls)

    def gradient_norms(self, context_id: int, norm_type: float) -> list[torch.Tensor]:
        """Return the norms of a context's gradients, a tensor for each owner."""
        calls = {
            worker: (reference, context_id, norm_type)
            for worker, reference in self.references.items()
        }
        norms = call_all("DistributedOptimizer.clip_grad_norm_", local.gradient_norms, calls)
        return [norms[worker] for worker in calls]

    def scale_gradients(self, context_id: int, factor: float) -> None:
        """Multiply a context's gradients, in place."""
        calls = {
            worker: (reference, context_id, factor) for worker, reference in self.references.items()
        }
        call_all("DistributedOptimizer.clip_grad_norm_", local.scale_gradients, calls)

    def state(self) -> dict[int, object]:
        """Return the state of each parameter, by number, on the CPU."""
        calls = {worker: (reference,) for worker, reference in self.references.items()}
        states = call_all("DistributedOptimizer.state_dict", local.state, calls)
        return self.layout.gather(states)

    def load_state(
        self, state: Mapping[int, object], settings: Sequence[dict[str, object]]
    ) -> None:
        """Load the state of each parameter, by number, and the settings of each group."""
        parts = self.layout.scatter(state, self.references)
        calls = {
            worker: (
                reference,
                parts[worker],
                [settings[number] for number in self.layout.groups_of(worker)],
            )
            for worker, reference in self.references.items()
        }
        call_all("DistributedOptimizer.load_state_dict", local.load_state, calls)

    def _make_arguments(self, parts: list[Group]) -> tuple[object, ...]:
        named, is_functional, args, kwargs = self._recipe
        return named, is_functional, parts, args, kwargs

    def _append(
        self,
        rrefs: Sequence[RRef[object]],
        parts: Mapping[WorkerInfo, tuple[list[int], dict[str, object]]],
    ) -> dict[str, object]:
        """Number a new group's parameters; return its settings, as its first owner has them."""
        owners = [rref.owner() for rref in rrefs]
        self.layout.add(owners, {worker: counts for worker, (counts, _) in parts.items()})
        return parts[owners[0]][1]

    def _own(
        self, worker: WorkerInfo, changes: Mapping[int, dict[str, object]]
    ) -> dict[int, dict[str, object]]:
        """Return the changes of a worker's groups, by its own numbers."""
        return {
            here: changes[number]
            for here, number in enumerate(self.layout.groups_of(worker))
            if number in changes
        }
