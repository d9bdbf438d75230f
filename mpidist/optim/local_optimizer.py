"""Local optimizer of the parameters that one worker owns; trainers change it by messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.optim import fused, registry
from mpidist.optim.grad_attribute import GradAttributeOptimizer
from mpidist.optim.param_groups import Group, settings_of
from mpidist.optim.registry import FunctionalClass
from mpidist.rpc.rref import RRef

# Settings that choose kernels. Constructors check them together with the other arguments; later
# changes are not checked by torch.
_SWITCHES = ("fused", "foreach", "capturable", "differentiable")


class LocalOptimizer:
    """Optimizer with its parameters in the order of its groups.

    Attributes:
        parameters: This worker's.
        counts: For each group, the number of parameters of each reference.
        optimizer: The optimizer itself.

    Raises:
        TypeError: No optimizer class, or a reference to another type or worker.
        Exception: An error of the class.
    """

    def __init__(
        self,
        named: str | FunctionalClass | type[torch.optim.Optimizer],
        is_functional: bool,
        groups: Sequence[Group],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        make = _optimizer_class(named, is_functional)
        self.counts: list[list[int]] = []
        self.parameters: list[torch.Tensor] = []
        taken = [self._take(*group) for group in groups]
        # A user's functional optimizer may not accept groups; torch's do not accept an empty list.
        is_plain = len(taken) == 1 and not groups[0][1] and self.parameters
        self.optimizer = make(self.parameters[:] if is_plain else taken, *args, **kwargs)

    def add(self, references: Sequence[RRef[object]], settings: Mapping[str, object]) -> None:
        """Add a group.

        Raises:
            ValueError: Settings that enable kernels which the optimizer does not use.
        """
        _require_switches(settings, getattr(self.optimizer, "defaults", {}))
        group = self._take(references, settings)
        try:
            self.attribute("add_param_group")(group)
        except BaseException:
            self._forget_last()
            raise

    def remove_last(self) -> None:
        """Remove the last added group, before any step has used it.

        Raises:
            ValueError: Only the first group is left.
        """
        if len(self.counts) < 2:
            raise ValueError("an optimizer keeps its first group of parameters")
        self.attribute("remove_last_group")()
        self._forget_last()

    def settings(self) -> list[dict[str, object]]:
        """Return the settings of each group."""
        groups = getattr(self.optimizer, "param_groups", None)
        if groups is None:
            return [{} for _ in self.counts]
        return [settings_of(group) for group in groups]

    def change(self, changes: Mapping[int, Mapping[str, object]]) -> None:
        """Change settings of groups, by number: all or none. Schedulers may add settings.

        Raises:
            LookupError: No such group.
            ValueError: Settings that enable kernels which the group does not use.
        """
        if not changes:
            return
        groups = self.attribute("param_groups")
        for number, settings in changes.items():
            if number not in range(len(groups)):
                raise LookupError(f"there is no group {number}")
            _require_switches(settings, groups[number])
        for number, settings in changes.items():
            groups[number].update(settings_of(settings))

    def load(
        self, state: Mapping[int, Mapping[str, object]], settings: Sequence[Mapping[str, object]]
    ) -> None:
        """Load each parameter's state, by this worker's numbers, and each group's settings.

        Raises:
            ValueError: Another number of groups, no such parameter, a state of a shape that the
                fused kernel does not take, or settings that enable kernels which the group does not
                use.
        """
        numbers = iter(range(len(self.parameters)))
        groups = [
            {**new, "params": [next(numbers) for _ in range(sum(counts))]}
            for new, counts in zip(settings, self.counts, strict=True)
        ]
        load = self.attribute("load_state_dict")
        for new, old in zip(settings, self.settings(), strict=True):
            _require_switches(new, old)
        if strange := [number for number in state if number not in range(len(self.parameters))]:
            raise ValueError(f"there are no parameters of the numbers {strange}")
        # Before anything is loaded: fused kernels read beyond memory of other strides.
        own = {
            number: {
                name: fused.laid_out(value, self.parameters[number])
                if isinstance(value, torch.Tensor)
                else value
                for name, value in values.items()
            }
            for number, values in state.items()
        }
        load({"state": own, "param_groups": groups})

    def attribute(self, name: str) -> Any:
        """Return an attribute that a functional optimizer may lack. No message gives the name.

        Raises:
            TypeError: The optimizer has no such attribute.
        """
        if not hasattr(self.optimizer, name):
            raise TypeError(
                f"{type(self.optimizer).__qualname__}, a registered functional optimizer, has no "
                f"{name}"
            )
        return getattr(self.optimizer, name)

    def _take(
        self, references: Sequence[RRef[object]], settings: Mapping[str, object]
    ) -> dict[str, object]:
        found = [_parameters_of(reference) for reference in references]
        own = [parameter for parameters in found for parameter in parameters]
        self.counts.append([len(parameters) for parameters in found])
        self.parameters += own
        return {**settings, "params": own}

    def _forget_last(self) -> None:
        del self.parameters[len(self.parameters) - sum(self.counts.pop()) :]


def of(reference: RRef[LocalOptimizer]) -> LocalOptimizer:
    """Return the optimizer of a reference.

    Raises:
        TypeError: The reference is to another type.
    """
    value: object = _owned(reference)
    if type(value) is not LocalOptimizer:
        raise TypeError(
            f"{reference!r} is a reference to a {type(value).__qualname__}, and to no optimizer of "
            "this worker"
        )
    return value


def _owned(reference: object) -> object:
    if type(reference) is not RRef or not reference.is_owner():
        raise TypeError(
            "an optimizer takes references to values of its own worker; got a "
            f"{type(reference).__qualname__}"
        )
    return reference.local_value()


def _parameters_of(reference: object) -> list[torch.Tensor]:
    value = _owned(reference)
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.Tensor):
        return [value]
    raise TypeError(
        f"an optimizer takes references to parameters or modules; {reference!r} is one to a "
        f"{type(value).__qualname__}"
    )


def _optimizer_class(named: Any, is_functional: bool) -> FunctionalClass:
    """Return the class or function that makes the optimizer."""
    if is_functional:
        return registry.resolve(named)
    if isinstance(named, type) and issubclass(named, torch.optim.Optimizer):
        return partial(GradAttributeOptimizer, named)
    raise TypeError(
        "an optimizer is a class, or a name of mpidist.optim.functional; got a "
        f"{type(named).__qualname__}"
    )


def _require_switches(settings: Mapping[str, object], present: Mapping[str, object]) -> None:
    """Refuse settings that enable kernels which the group, or the optimizer's default, does not."""
    for name in _SWITCHES:
        if settings.get(name) and not (settings[name] is True and present.get(name) is True):
            raise ValueError(
                f"{name!r} is switched on where the optimizer is made, and by no message; it is "
                f"{present.get(name)!r} here"
            )
