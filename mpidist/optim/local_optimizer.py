"""Local optimizer of the parameters that one worker owns; trainers make and change it by messages.

Values from messages are checked before use, with or without an allowlist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeGuard

import torch

from mpidist.errors import MpidistError
from mpidist.optim import loaded_state, registry
from mpidist.optim.grad_attribute import GradAttributeOptimizer
from mpidist.optim.param_groups import PARAMETER_KEYS, settings_of
from mpidist.optim.registry import FunctionalClass
from mpidist.rpc import current
from mpidist.rpc.rref import RRef


class LocalOptimizer:
    """Optimizer with its parameters in the order of its groups.

    Attributes:
        parameters: This worker's.
        counts: For each group, the number of parameters of each reference.
        optimizer: The optimizer itself.

    Raises:
        TypeError: An argument of another type, or a reference to another type or worker.
        MpidistError: The class is not in this worker's allowlist.
        Exception: An error of the class.
    """

    def __init__(
        self, named: object, is_functional: object, groups: object, args: object, kwargs: object
    ) -> None:
        if type(is_functional) is not bool or not _is_list(groups) or not _is_list(args):
            raise TypeError(
                "an optimizer is made of a class, whether it is functional, a list of groups and "
                "its arguments"
            )
        make = _optimizer_class(named, is_functional)
        options = _require_names(kwargs)
        self.counts: list[list[int]] = []
        self.parameters: list[torch.Tensor] = []
        parts = [_parts(group) for group in groups]
        taken = [self._take(*part) for part in parts]
        # A user's functional optimizer may not accept groups; torch's do not accept an empty list.
        is_plain = len(taken) == 1 and not parts[0][1] and self.parameters
        self.optimizer = make(self.parameters[:] if is_plain else taken, *args, **options)

    def add(self, references: object, settings: object) -> None:
        """Add a group.

        Raises:
            ValueError: Settings that enable kernels which the optimizer does not use.
        """
        rrefs, given = _parts((references, settings))
        loaded_state.require_switches(given, getattr(self.optimizer, "defaults", {}))
        group = self._take(rrefs, given)
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

    def change(self, changes: object) -> None:
        """Change settings of groups, by number: all or none. Schedulers may add settings.

        Raises:
            TypeError: No settings by number.
            ValueError: No such group, or settings that enable kernels which the group does not use.
        """
        if type(changes) is not dict:
            raise TypeError(f"settings are changed by a dict; got a {type(changes).__name__}")
        if not changes:
            return
        groups = self.attribute("param_groups")
        for number, settings in changes.items():
            if type(number) is not int or not 0 <= number < len(groups):
                raise ValueError(
                    f"there are {len(groups)} groups of parameters here; got settings for another"
                )
            _require_settings(settings)
            loaded_state.require_switches(settings, groups[number])
        for number, settings in changes.items():
            groups[number].update(settings)

    def load(self, state: object, settings: object) -> None:
        """Load each parameter's state, by this worker's numbers, and each group's settings.

        Raises:
            TypeError: No state by number, or no settings.
            ValueError: Another number of groups, no such parameter, a state that the fused kernel
                does not take, or settings that enable kernels which the group does not use.
        """
        if type(state) is not dict or not _is_list(settings):
            raise TypeError("a state is a dict, and settings of groups are a list")
        given = [_require_settings(each) for each in settings]
        for number, values in state.items():
            if type(number) is not int or not 0 <= number < len(self.parameters):
                raise ValueError(
                    f"there are {len(self.parameters)} parameters here; got a state for another"
                )
            _require_names(values)
        numbers = iter(range(len(self.parameters)))
        groups = [
            {**new, "params": [next(numbers) for _ in range(sum(counts))]}
            for new, counts in zip(given, self.counts, strict=True)
        ]
        present = getattr(self.optimizer, "param_groups", None) or [{} for _ in groups]
        is_fused = []
        for new, old, counts in zip(given, present, self.counts, strict=True):
            loaded_state.require_switches(new, old)
            is_fused += [bool(old.get("fused"))] * sum(counts)
        load = self.attribute("load_state_dict")
        before = self.attribute("state_dict")()["state"] if any(is_fused) else {}
        values = loaded_state.checked(state, self.parameters, is_fused, before)
        load({"state": values, "param_groups": groups})

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
        self, references: Sequence[object], settings: Mapping[str, object]
    ) -> dict[str, object]:
        found = [_parameters_of(reference) for reference in references]
        own = [parameter for parameters in found for parameter in parameters]
        self.counts.append([len(parameters) for parameters in found])
        self.parameters += own
        return {**settings, "params": own}

    def _forget_last(self) -> None:
        del self.parameters[len(self.parameters) - sum(self.counts.pop()) :]


def of(reference: object) -> LocalOptimizer:
    """Return the optimizer of a reference.

    Raises:
        TypeError: The reference is to another type.
    """
    value = _owned(reference)
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


def _optimizer_class(named: object, is_functional: bool) -> FunctionalClass:
    """Return the class or function that makes the optimizer: by name, or from the allowlist."""
    if is_functional and type(named) is str:
        return registry.resolve(named)
    allowed = current.require().allowed
    make: FunctionalClass
    if (
        is_functional
        and callable(named)
        and (isinstance(named, (type, FunctionType, BuiltinFunctionType)) or allowed is None)
    ):
        make = named
    elif not is_functional and isinstance(named, type) and issubclass(named, torch.optim.Optimizer):
        make = partial(GradAttributeOptimizer, named)
    else:
        raise TypeError(
            "an optimizer is a class, or a name of mpidist.optim.functional; got a "
            f"{type(named).__qualname__}"
        )
    if isinstance(named, type) and allowed is not None and not allowed.has_class(named):
        raise MpidistError(
            f'"{named.__module__}.{named.__qualname__}" is not in the list of what this worker '
            "allows"
        )
    return make


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return type(value) is list or type(value) is tuple


def _parts(group: object) -> tuple[Sequence[object], dict[str, object]]:
    if not _is_list(group) or len(group) != 2 or not _is_list(references := group[0]):
        raise TypeError("a group is a list of references, and settings")
    return references, _require_settings(group[1])


def _require_settings(settings: object) -> dict[str, object]:
    found = _require_names(settings)
    for key in PARAMETER_KEYS:
        if key in found:
            raise TypeError(f"{key!r} is no setting of a group of parameters")
    return found


def _require_names(values: object) -> dict[str, object]:
    if type(values) is not dict or not all(type(key) is str for key in values):
        raise TypeError(
            "settings, keyword arguments and a parameter's state are dicts with names as keys"
        )
    return values
