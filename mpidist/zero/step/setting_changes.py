"""Changes of settings by a base optimizer that takes one step in several calls of ``step``.

Some optimizers count their steps in the parameter group (apex's fused ones and timm's Adan in
``group["step"]``) or in an attribute, and not in each parameter's state. Every call of one step
must begin with the count of before the step, and the step as a whole count once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpidist.zero.shards import groups

Tensor = torch.Tensor


class SettingChanges:
    """Settings that the calls of one step have changed, to be set after the last call."""

    def __init__(self) -> None:
        self._of_groups: dict[int, groups.Settings] = {}
        self._of_attributes: dict[str, Any] = {}

    @contextmanager
    def kept_back(self, optim: torch.optim.Optimizer) -> Iterator[None]:
        """Keep back what one call changes: afterwards all settings are as before.

        Settings are those of the groups, and the optimizer's attributes that are numbers.
        """
        held = [groups.settings(group) for group in optim.param_groups]
        # The call changes copies of tensors in place, so that the originals keep their values.
        given = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in each.items()
            }
            for each in held
        ]
        groups.sync(given, optim.param_groups)
        numbers = _numbers(optim)
        try:
            yield
        finally:
            for index, group in enumerate(optim.param_groups):
                changed = _changed(groups.settings(group), given[index])
                of_group = self._of_groups.setdefault(index, {})
                # A call that has none of the group's parameters may count, but not measure.
                of_group.update(changed if group["params"] else {**changed, **of_group})
            groups.sync(held, optim.param_groups)
            attributes = _changed(_numbers(optim), numbers)
            self._of_attributes |= attributes
            for name in attributes.keys() - numbers.keys():
                delattr(optim, name)
            vars(optim).update(numbers)

    def set(self, optim: torch.optim.Optimizer) -> None:
        """Set what was kept back; tensors in place."""
        for index, changed in self._of_groups.items():
            group = optim.param_groups[index]
            for key, value in changed.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        vars(optim).update(self._of_attributes)


def _numbers(optim: torch.optim.Optimizer) -> dict[str, int | float]:
    return {name: value for name, value in vars(optim).items() if type(value) in (int, float)}


def _changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in now.items()
        if key not in before
        or value is not before[key]
        or (isinstance(value, Tensor) and value._version > 0)
    }
