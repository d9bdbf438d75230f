"""Distributed optimizer, caller's side: each parameter is updated by its owner, called by RPC."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from mpidist.dynamo import untraced
from mpidist.optim import answers, gradients, local
from mpidist.optim.layout import Layout
from mpidist.optim.local_optimizer import Group
from mpidist.optim.owner_calls import call_all, raise_for, start_all
from mpidist.optim.param_groups import groups_of, same, settings_of, snapshot
from mpidist.optim.registry import functional_optim_map, name_or_class
from mpidist.rpc.worker import WorkerInfo


@untraced
class DistributedOptimizer(Optimizer):
    """Optimizer over remote parameters: each owner has a local optimizer, called by RPC.

    ``step`` takes the gradients of a distributed autograd context; ``.grad`` of the parameters does
    not change. Several trainers may optimize the same parameters, each with its own object and so
    its own state. On each worker their steps run one after the other, in the order of arrival,
    which may differ between workers. A step is an in-place change of the parameters: another
    trainer's backward pass that needs their old values raises.

    torch's LR schedulers work on this ``torch.optim.Optimizer``: they write to ``param_groups``,
    and the next ``step`` sends the changed settings.

    Methods that call the owners call all at the same time, and wait for the last answer.

    Attributes:
        param_groups: As torch's; ``"params"`` are the references.
        is_functional_optim: The optimizer takes gradients as arguments (``functional_optim_map``).

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer``, or a key of
            ``functional_optim_map``. Classes in that map are replaced by their functional form;
            others use ``.grad``, which is restored, under a lock.
        params_rref: References to parameters, or to modules for all of their ``parameters()``; or
            dicts with these as ``"params"`` and their own settings, as for torch.
        args: For the class, on each owner.
        kwargs: For the class, on each owner.

    Raises:
        TypeError: No optimizer class, one whose steps need a closure, or no references.
        ValueError: No parameters.
        WorkerErrors: An owner could not make its optimizer: wrong arguments, or a reference to
            another type.

    Source: ``torch.distributed.optim.DistributedOptimizer``. Additions: ``state_dict``,
    ``param_groups``, ``add_param_group``, ``clip_grad_norm_``, references to modules, all workers'
    errors in one.
    """

    def __init__(
        self, optimizer_class: Any, params_rref: Iterable[Any], *args: Any, **kwargs: Any
    ) -> None:
        functional = functional_optim_map.get(optimizer_class)
        if functional is None and not (
            isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
        ):
            raise TypeError(
                "optimizer_class is a subclass of torch.optim.Optimizer, or registered; got "
                f"{optimizer_class!r}"
            )
        if functional is None and _needs_closure(optimizer_class):
            name = optimizer_class.__name__
            raise TypeError(
                f"{name} evaluates the model within its steps (closure), which no owner of "
                "parameters can do"
            )
        self.is_functional_optim = functional is not None
        named = optimizer_class if functional is None else name_or_class(functional)
        self._recipe = (named, self.is_functional_optim, args, kwargs)
        self._layout: Layout[WorkerInfo] = Layout()
        self._optimizers: dict[WorkerInfo, Any] = {}
        self._sent: list[dict[str, Any]] = []
        # torch's constructor needs tensors; __setstate__ accepts groups of references.
        super().__setstate__({"defaults": {}, "state": {}, "param_groups": []})
        self._make_all(groups_of(params_rref))

    @property
    def remote_optimizers(self) -> list[Any]:
        """References to the local optimizers, one for each owner."""
        return list(self._optimizers.values())

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient in a context.

        Args:
            context_id: The distributed autograd context, after its backward pass.

        Raises:
            RuntimeError: This worker has no such context.
            WorkerErrors: Some owners' steps failed; the other owners have stepped.
        """
        gradients.require_context(context_id)
        changes = self._changes()
        calls = {
            worker: (optimizer, context_id, self._own(worker, changes))
            for worker, optimizer in self._optimizers.items()
        }
        call_all("DistributedOptimizer.step", local.step, calls)
        for number, settings in changes.items():
            self._sent[number].update(snapshot(settings))

    def clip_grad_norm_(
        self,
        context_id: int,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale a context's gradients such that their total norm is at most ``max_norm``.

        One round of calls gets the norms; a second scales, if needed.

        Args:
            context_id: The distributed autograd context, after its backward pass.
            max_norm: The largest norm.
            norm_type: p of the p-norm; may be ``inf``.
            error_if_nonfinite: Raise, without scaling, if the norm is infinite or NaN.

        Returns:
            The norm before scaling, on the CPU.

        Raises:
            RuntimeError: No such context, or a norm refused by ``error_if_nonfinite``.
            WorkerErrors: Owners' errors.

        Source: ``torch.nn.utils.clip_grad_norm_``.
        """
        gradients.require_context(context_id)
        max_norm, norm_type = float(max_norm), float(norm_type)
        calls = {
            worker: (optimizer, context_id, norm_type)
            for worker, optimizer in self._optimizers.items()
        }
        norms = call_all("DistributedOptimizer.clip_grad_norm_", local.gradient_norms, calls)
        total = gradients.total_norm([norms[worker] for worker in calls], norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from the context is "
                "non-finite, so it cannot be clipped. "
                "To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        factor = max_norm / (float(total) + 1e-6)
        if not factor >= 1.0:
            calls = {
                worker: (optimizer, context_id, factor)
                for worker, optimizer in self._optimizers.items()
            }
            call_all("DistributedOptimizer.clip_grad_norm_", local.scale_gradients, calls)
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing; for compatibility with training loops. Gradients end with their context."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings. Must not run during a step of this object.

        Args:
            param_group: ``"params"`` are references to parameters or modules, or a single one.

        Raises:
            TypeError: No references.
            WorkerErrors: An owner refused; no owner then has the group.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        (group,) = groups_of([param_group])
        owners = [rref.owner() for rref in group["params"]]
        settings = settings_of(group)
        own = {
            worker: [rref for rref in group["params"] if rref.owner() == worker]
            for worker in owners
        }
        present = {
            worker: (self._optimizers[worker], rrefs, settings)
            for worker, rrefs in own.items()
            if worker in self._optimizers
        }
        absent = {
            worker: self._make_arguments([(rrefs, settings)])
            for worker, rrefs in own.items()
            if worker not in self._optimizers
        }
        added, errors = start_all(local.add_group, present)
        made, more = start_all(local.make, absent)
        if errors or more:
            start_all(local.remove_group, {worker: (self._optimizers[worker],) for worker in added})
        raise_for("DistributedOptimizer.add_param_group", {**errors, **more}, len(own))
        added = {
            worker: answers.group(worker, answer, len(own[worker]))
            for worker, answer in added.items()
        }
        for worker, answer in made.items():
            self._optimizers[worker], (counts,), (found,), _ = answers.construction(
                worker, answer, [len(own[worker])]
            )
            added[worker] = counts, found
        self._append_group(
            group, {worker: counts for worker, (counts, _) in added.items()}, added[owners[0]][1]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, gathered from their owners, on the CPU.

        The format is that of torch's optimizer of the same name over all parameters, in the order
        of the references (a module's in the order of ``parameters()``). That optimizer can load it,
        and so can a DistributedOptimizer over references in the same order, for any owners.

        Raises:
            WorkerErrors: Owners' errors.
        """
        states = call_all(
            "DistributedOptimizer.state_dict",
            local.state,
            {worker: (optimizer,) for worker, optimizer in self._optimizers.items()},
        )
        for worker, found in states.items():
            answers.state(worker, found, sum(map(len, self._layout.numbers_of(worker))))
        groups = [
            {**snapshot(settings_of(group)), "params": numbers}
            for group, numbers in zip(self.param_groups, self._layout.numbers(), strict=True)
        ]
        return {"state": self._layout.gather(states), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and send each owner its part.

        Args:
            state_dict: Of this class, or of torch's optimizer of the same name.

        Raises:
            ValueError: The number of groups, or of parameters in one, differs; nothing is loaded.
            WorkerErrors: Owners' errors; the other owners have loaded their parts.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"loaded state dict has a different number of parameter groups: {len(groups)}, not "
                f"{len(self.param_groups)}"
            )
        for number, group in enumerate(groups):
            if len(group["params"]) != self._layout.size(number):
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match the size of "
                    "optimizer's group: "
                    f"group {number} has {len(group['params'])} parameters, not "
                    f"{self._layout.size(number)}"
                )
        order = [number for group in groups for number in group["params"]]
        state = {
            place: state_dict["state"][number]
            for place, number in enumerate(order)
            if number in state_dict["state"]
        }
        settings = [snapshot(settings_of(group)) for group in groups]
        parts = self._layout.scatter(state, self._optimizers)
        calls = {
            worker: (
                optimizer,
                parts[worker],
                [settings[number] for number in self._layout.groups_of(worker)],
            )
            for worker, optimizer in self._optimizers.items()
        }
        call_all("DistributedOptimizer.load_state_dict", local.load_state, calls)
        for group, loaded in zip(self.param_groups, settings, strict=True):
            group.update(snapshot(loaded))
        self._sent = settings

    def _make_all(self, groups: list[dict[str, Any]]) -> None:
        own: dict[WorkerInfo, list[Group]] = {}
        for group in groups:
            for worker in dict.fromkeys(rref.owner() for rref in group["params"]):
                rrefs = [rref for rref in group["params"] if rref.owner() == worker]
                own.setdefault(worker, []).append((rrefs, settings_of(group)))
        calls = {worker: self._make_arguments(parts) for worker, parts in own.items()}
        made = call_all(f"DistributedOptimizer({self._recipe[0]!r})", local.make, calls)
        made = {
            worker: answers.construction(worker, answer, [len(rrefs) for rrefs, _ in own[worker]])
            for worker, answer in made.items()
        }
        self._optimizers = {worker: answer[0] for worker, answer in made.items()}
        self.defaults.update(next(iter(made.values()))[3])
        counts = {worker: iter(answer[1]) for worker, answer in made.items()}
        settings = {worker: iter(answer[2]) for worker, answer in made.items()}
        for group in groups:
            owners = dict.fromkeys(rref.owner() for rref in group["params"])
            found = {worker: next(settings[worker]) for worker in owners}
            self._append_group(
                group,
                {worker: next(counts[worker]) for worker in owners},
                next(iter(found.values()), {}),
            )
        if not any(self._layout.size(number) for number in range(len(groups))):
            raise ValueError(
                "optimizer got an empty parameter list: the modules have no parameters"
            )

    def _make_arguments(self, parts: list[Group]) -> tuple[Any, ...]:
        named, is_functional, args, kwargs = self._recipe
        return named, is_functional, parts, args, kwargs

    def _append_group(
        self,
        group: dict[str, Any],
        counts: Mapping[WorkerInfo, list[int]],
        settings: dict[str, Any],
    ) -> None:
        self._layout.add([rref.owner() for rref in group["params"]], counts)
        self.param_groups.append({**group, **settings})
        self._sent.append(snapshot(settings_of(self.param_groups[-1])))

    def _changes(self) -> dict[int, dict[str, Any]]:
        """Return each group's settings that changed since they were sent to its owners."""
        found = {}
        for number, (group, sent) in enumerate(zip(self.param_groups, self._sent, strict=True)):
            new = {
                key: value
                for key, value in group.items()
                if key != "params" and (key not in sent or not same(value, sent[key]))
            }
            if new:
                found[number] = new
        return found

    def _own(
        self, worker: WorkerInfo, changes: Mapping[int, dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        if not changes:
            return {}
        return {
            here: changes[number]
            for here, number in enumerate(self._layout.groups_of(worker))
            if number in changes
        }


def _needs_closure(optimizer_class: type[Optimizer]) -> bool:
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
