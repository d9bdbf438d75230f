"""Registry of functional optimizers, which ``DistributedOptimizer`` uses in place of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.optim

from mpidist.optim.functional import optimizers
from mpidist.optim.functional.optimizer import FunctionalOptimizer


class GradientsOptimizer(Protocol):
    """Optimizer whose ``step`` takes gradients; other attributes of torch's may be absent."""

    def step(self, gradients: Sequence[torch.Tensor | None], /) -> object:
        """Update the parameters; for None a parameter does not change."""


# A class, or a function that makes an optimizer.
FunctionalClass = Callable[..., GradientsOptimizer]

_OURS: dict[object, type[FunctionalOptimizer]] = {
    torch.optim.SGD: optimizers.SGD,
    torch.optim.Adam: optimizers.Adam,
    torch.optim.AdamW: optimizers.AdamW,
    torch.optim.Adagrad: optimizers.Adagrad,
    torch.optim.Adadelta: optimizers.Adadelta,
    torch.optim.Adamax: optimizers.Adamax,
    torch.optim.RMSprop: optimizers.RMSprop,
    torch.optim.Rprop: optimizers.Rprop,
}
_NAMES = {functional.__name__: functional for functional in _OURS.values()}
functional_optim_map: dict[object, FunctionalClass] = {**_OURS}


def register_functional_optim(key: object, optim: FunctionalClass) -> None:
    """Register a functional optimizer; a registered key does not change.

    Only callers of ``DistributedOptimizer`` need to register: messages carry the class to the
    parameters' owners, which must be able to import it.

    Args:
        key: ``optimizer_class`` of ``DistributedOptimizer``; need not be a class.
        optim: Called on each owner with its parameters, a list, and the optimizer's other
            arguments. The result has ``step(gradients)``, with a gradient or None for each
            parameter; ``param_groups``, ``add_param_group``, ``state_dict`` and
            ``load_state_dict``, in torch's format, are used if present.
    """
    functional_optim_map.setdefault(key, optim)


def name_or_class(functional: FunctionalClass) -> str | FunctionalClass:
    """Return an optimizer's name in messages: a string for this library's, else the class."""
    name = getattr(functional, "__name__", "")
    return name if _NAMES.get(name) is functional else functional


def resolve(named: str | FunctionalClass) -> FunctionalClass:
    """Return the optimizer of a name in a message.

    Raises:
        ValueError: This library has no optimizer of that name.
    """
    if not isinstance(named, str):
        return named
    if named not in _NAMES:
        raise ValueError(
            f"mpidist.optim.functional has no optimizer {named!r}; it has {', '.join(_NAMES)}"
        )
    return _NAMES[named]
