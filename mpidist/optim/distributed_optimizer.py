"""Distributed optimizer, caller's side: each parameter is updated by its owner, called by RPC."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from mpidist import state_names
from mpidist.comm.recorder import recorder
from mpidist.dynamo import untraced
from mpidist.optim import gradients
from mpidist.optim.local_optimizer import LocalOptimizer
from mpidist.optim.param_groups import groups_of, same, settings_of, snapshot
from mpidist.optim.registry import functional_optim_map, name_or_class
from mpidist.optim.remote_optimizers import RemoteOptimizers
from mpidist.rpc.rref import RRef


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
        self,
        optimizer_class: object,
        params_rref: Iterable[object],
        *args: object,
        **kwargs: object,
    ) -> None:
        functional = functional_optim_map.get(optimizer_class)
        self.is_functional_optim = functional is not None
        self._kind = optimizer_class if isinstance(optimizer_class, type) else object
        self._remote = RemoteOptimizers(
            _require_class(optimizer_class) if functional is None else name_or_class(functional),
            self.is_functional_optim,
            args,
            kwargs,
        )
        # Each group's settings as its owners have them.
        self._sent: list[dict[str, object]] = []
        # torch's constructor needs tensors; __setstate__ accepts groups of references.
        super().__setstate__({"defaults": {}, "state": {}, "param_groups": []})
        groups = groups_of(params_rref)
        settings, defaults = self._remote.make(groups)
        self.defaults.update(defaults)
        for (rrefs, given), found in zip(groups, settings, strict=True):
            self._append_group(rrefs, {**given, **found})
        if not any(self._remote.layout.size(number) for number in range(len(groups))):
            raise ValueError(
                "optimizer got an empty parameter list: the modules have no parameters"
            )

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """References to the local optimizers, one for each owner."""
        return list(self._remote.references.values())

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient in a context.

        Args:
            context_id: The distributed autograd context, after its backward pass.

        Raises:
            RuntimeError: This worker has no such context.
            KeyError: A setting was deleted from ``param_groups``.
            WorkerErrors: Some owners' steps failed; the other owners have stepped.
        """
        gradients.require_context(context_id)
        changes = self._changes()
        with recorder.recorded("step", "DistributedOptimizer"):
            self._remote.step(context_id, changes)
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
        norms = self._remote.gradient_norms(context_id, norm_type)
        total = gradients.total_norm(norms, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from the context is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        factor = max_norm / (float(total) + 1e-6)
        if not factor >= 1.0:
            self._remote.scale_gradients(context_id, factor)
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
        rrefs, given = group
        self._append_group(rrefs, {**given, **self._remote.add(group)})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, gathered from their owners, on the CPU.

        The format is that of torch's optimizer of the same name over all parameters, in the order
        of the references (a module's in the order of ``parameters()``). That optimizer can load it,
        and so can a DistributedOptimizer over references in the same order, for any owners.

        Raises:
            WorkerErrors: Owners' errors.
        """
        state = self._remote.state()
        groups = [
            {**snapshot(settings_of(group)), "params": numbers}
            for group, numbers in zip(self.param_groups, self._remote.layout.numbers(), strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and send each owner its part.

        Args:
            state_dict: Of this class, or of torch's optimizer of the same name.

        Raises:
            ValueError: The number of groups, or of parameters in one, differs, a group lacks a
                setting, or a parameter's state a name; nothing is loaded.
            WorkerErrors: Owners' errors; the other owners have loaded their parts.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"loaded state dict has a different number of parameter groups: {len(groups)}, not "
                f"{len(self.param_groups)}"
            )
        for number, group in enumerate(groups):
            size = self._remote.layout.size(number)
            if len(group["params"]) != size:
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match the size of "
                    f"optimizer's group: group {number} has {len(group['params'])} parameters, "
                    f"not {size}"
                )
        state_names.require_complete(self._kind, self.defaults, groups, state_dict["state"])
        order = [number for group in groups for number in group["params"]]
        state = {
            place: state_dict["state"][number]
            for place, number in enumerate(order)
            if number in state_dict["state"]
        }
        settings = [snapshot(settings_of(group)) for group in groups]
        self._remote.load_state(state, settings)
        for group, loaded in zip(self.param_groups, settings, strict=True):
            group.update(snapshot(loaded))
        self._sent = settings

    def _append_group(self, rrefs: list[RRef[object]], settings: dict[str, object]) -> None:
        self.param_groups.append({"params": rrefs, **settings})
        self._sent.append(snapshot(settings))

    def _changes(self) -> dict[int, dict[str, object]]:
        """Return each group's settings that changed since they were sent to its owners.

        Raises:
            KeyError: One was deleted, which its owners have.
        """
        found = {}
        for number, (group, sent) in enumerate(zip(self.param_groups, self._sent, strict=True)):
            for key in sent:
                if key not in group:
                    raise KeyError(
                        f"{key!r} is missing in param_groups[{number}] of a DistributedOptimizer: "
                        "the owners of the parameters have it, and a setting may be changed there "
                        "but not deleted"
                    )
            new = {
                key: value
                for key, value in group.items()
                if key != "params" and (key not in sent or not same(value, sent[key]))
            }
            if new:
                found[number] = new
        return found


def _require_class(optimizer_class: object) -> type[Optimizer]:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "optimizer_class is a subclass of torch.optim.Optimizer, or registered; got "
            f"{optimizer_class!r}"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{optimizer_class.__name__} evaluates the model within its steps (closure), which no "
            "owner of parameters can do"
        )
    return optimizer_class
