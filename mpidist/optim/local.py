"""Owner's side of ``DistributedOptimizer``: the optimizer of the parameters that one worker owns.

The functions are what messages name: a worker with a list of what may be called here
(``init_rpc(..., allowed=[...])``) allows this module, ``"mpidist.optim.local"``. The optimizers of
``mpidist.optim.functional`` go by a string; all other classes must be in the list, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpidist.optim import gradients, registry
from mpidist.optim.grad_attribute import GradAttributeOptimizer
from mpidist.rpc.rref import RRef

Group = tuple[Sequence[Any], dict[str, Any]]  # references, and the settings that were given for them


class LocalOptimizer:
    """An optimizer, and the parameters in the order of its groups.

    Attributes:
        parameters: Those of this worker.
        counts: For each group, how many parameters each reference stands for.
    """

    def __init__(self, named: Any, is_functional: bool, groups: Sequence[Group], args: Any, kwargs: Any) -> None:
        self.counts: list[list[int]] = []
        self.parameters: list[torch.Tensor] = []
        made = [self._take(references, settings) for references, settings in groups]
        # A functional optimizer of a user's may take no groups; torch's take no empty list of parameters.
        is_plain = len(made) == 1 and not groups[0][1] and self.parameters
        params: Any = made[0]["params"] if is_plain else made
        if is_functional:
            self.optimizer = registry.resolve(named)(params, *args, **kwargs)
        else:
            self.optimizer = GradAttributeOptimizer(named, params, *args, **kwargs)

    def add(self, references: Sequence[Any], settings: dict[str, Any]) -> None:
        """Add a group."""
        group = self._take(references, settings)
        try:
            self._own("add_param_group")(group)
        except BaseException:
            self._forget_last()
            raise

    def remove_last(self) -> None:
        """Remove the last group, which no step has used yet."""
        self._own("remove_last_group")()
        self._forget_last()

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each group."""
        groups = getattr(self.optimizer, "param_groups", None)
        if groups is None:
            return [{} for _ in self.counts]
        return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]

    def change(self, changes: Mapping[int, dict[str, Any]]) -> None:
        """Change settings of groups, by number."""
        if changes:
            groups = self._own("param_groups")
            for number, settings in changes.items():
                groups[number].update(settings)

    def _take(self, references: Sequence[Any], settings: dict[str, Any]) -> dict[str, Any]:
        found = [_parameters_of(reference) for reference in references]
        own = [parameter for parameters in found for parameter in parameters]
        self.counts.append([len(parameters) for parameters in found])
        self.parameters += own
        return {**settings, "params": own}

    def _forget_last(self) -> None:
        del self.parameters[len(self.parameters) - sum(self.counts.pop()) :]

    def _own(self, name: str) -> Any:
        if not hasattr(self.optimizer, name):
            raise TypeError(f"{type(self.optimizer).__qualname__}, a registered functional optimizer, has no {name}")
        return getattr(self.optimizer, name)


def make(named: Any, is_functional: bool, groups: Sequence[Group], args: Any, kwargs: Any) -> Any:
    """Make this worker's optimizer.

    Args:
        named: A class, or the name of one in ``mpidist.optim.functional``.
        is_functional: Its ``step`` takes gradients.
        groups: Of references owned here.
        args: The class's further arguments.
        kwargs: The class's further arguments.

    Returns:
        A reference to it; for each group, how many parameters each reference stands for; the
        settings of each group; the class's defaults.

    Raises:
        TypeError: A reference to something else, or arguments that the class does not take.
        Exception: What the class raises.
    """
    local = LocalOptimizer(named, is_functional, groups, args, kwargs)
    return RRef(local), local.counts, local.settings(), dict(getattr(local.optimizer, "defaults", {}))


def add_group(optimizer: Any, references: Sequence[Any], settings: dict[str, Any]) -> Any:
    """Add a group; return how many parameters each reference has, and the group's settings."""
    local: LocalOptimizer = optimizer.local_value()
    local.add(references, settings)
    return local.counts[-1], local.settings()[-1]


def remove_group(optimizer: Any) -> None:
    """Remove the group that was added last, as another worker could not add its part."""
    optimizer.local_value().remove_last()


def step(optimizer: Any, context_id: int, changes: Mapping[int, dict[str, Any]]) -> None:
    """Update the parameters with a context's gradients.

    Blocks: while another optimizer updates one of these parameters.

    Args:
        optimizer: The reference to this worker's optimizer.
        context_id: The context; parameters without a gradient in it are left alone.
        changes: Settings that have changed since the last step, by the group's number here.
    """
    local: LocalOptimizer = optimizer.local_value()
    found = gradients.of_parameters(context_id, local.parameters)
    local.change(changes)
    local.optimizer.step(found)


def state(optimizer: Any) -> dict[int, Any]:
    """Return a copy of each parameter's state, on the CPU, by the parameter's number here."""
    local: LocalOptimizer = optimizer.local_value()
    locks = getattr(local.optimizer, "locks", None)
    if locks is None:
        return _copied(local._own("state_dict")()["state"])
    with locks:
        return _copied(local.optimizer.state_dict()["state"])


def load_state(optimizer: Any, state: Mapping[int, Any], settings: Sequence[dict[str, Any]]) -> None:
    """Load each parameter's state, by its number here, and each group's settings."""
    local: LocalOptimizer = optimizer.local_value()
    numbers = iter(range(len(local.parameters)))
    groups = [
        {**own, "params": [next(numbers) for _ in range(sum(counts))]} for own, counts in zip(settings, local.counts, strict=True)
    ]
    local._own("load_state_dict")({"state": dict(state), "param_groups": groups})


def gradient_norms(optimizer: Any, context_id: int, norm_type: float) -> torch.Tensor:
    """Return the norm of each parameter's gradient, of those that have one in a context."""
    return gradients.norms(gradients.of_parameters(context_id, optimizer.local_value().parameters), norm_type)


def scale_gradients(optimizer: Any, context_id: int, factor: float) -> None:
    """Multiply a context's gradients of the parameters, in place."""
    gradients.scale(gradients.of_parameters(context_id, optimizer.local_value().parameters), factor)


def _parameters_of(reference: Any) -> list[torch.Tensor]:
    value = reference.local_value()
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.Tensor):
        return [value]
    raise TypeError(
        f"an optimizer takes references to parameters or modules; {reference!r} is one to a {type(value).__qualname__}"
    )


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value
