"""Names of the settings and of the state that torch's optimizers need in a load (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

# All that a class may keep, by its exact class: a subclass may keep other state. They step each
# element by itself: its new value depends on that element alone, its gradient and its state.
NAMES: dict[type, frozenset[str]] = {
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Adam: frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    torch.optim.AdamW: frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    torch.optim.NAdam: frozenset({"step", "mu_product", "exp_avg", "exp_avg_sq"}),
    torch.optim.RAdam: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.Adamax: frozenset({"step", "exp_avg", "exp_inf"}),
    torch.optim.Adagrad: frozenset({"step", "sum"}),
    torch.optim.Adadelta: frozenset({"step", "square_avg", "acc_delta"}),
    torch.optim.RMSprop: frozenset({"step", "square_avg", "momentum_buffer", "grad_avg"}),
    torch.optim.Rprop: frozenset({"step", "prev", "step_size"}),
    torch.optim.ASGD: frozenset({"step", "eta", "mu", "ax"}),
}
# Names that a step reads only with a setting of the group. SGD makes a momentum that it lacks.
_SETTING = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}


def lacking(kind: type, group: Mapping[str, Any], values: Collection[str]) -> list[str]:
    """Return the names that a step of a parameter needs and its state lacks.

    A state without any is that of a parameter before its first step, and lacks nothing.

    Args:
        kind: Class of the optimizer; one that is not in ``NAMES`` needs nothing.
        group: Settings of the parameter's group.
        values: Names of the state.
    """
    held = set(values)
    if not held or kind is torch.optim.SGD:
        return []
    return sorted(
        name
        for name in NAMES.get(kind, frozenset()) - held
        if name not in _SETTING or group.get(_SETTING[name])
    )


def require_complete(
    kind: type,
    defaults: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Collection[str]],
) -> None:
    """Refuse a loaded state that a step could not use.

    Args:
        kind: As ``lacking``.
        defaults: Of the optimizer. A loaded group needs its numbers; switches, which torch adds
            from version to version, its classes add themselves.
        groups: Settings, with the state's keys of the parameters in ``params``.
        state: Each parameter's names, by key.

    Raises:
        ValueError: A group lacks a setting, or the state of a parameter a name.
    """
    needed = {
        name
        for name, value in defaults.items()
        if isinstance(value, (int, float, tuple, torch.Tensor)) and not isinstance(value, bool)
    }
    for group in groups:
        if absent := sorted(needed - set(group)):
            raise ValueError(
                f"the state dict is damaged, or of another class of optimizers: {kind.__name__} "
                f"needs {', '.join(absent)} in each parameter group"
            )
        names = group.get("param_names") or ()
        for place, key in enumerate(group["params"]):
            missing = lacking(kind, group, state.get(key) or ())
            if missing:
                name = f" ({names[place]!r})" if place < len(names) else ""
                raise ValueError(
                    f"the state dict is damaged: the state of parameter {key}{name} has no "
                    f"{', '.join(map(repr, missing))}, which {kind.__name__} needs beside "
                    f"{', '.join(map(repr, sorted(state[key])))}"
                )
