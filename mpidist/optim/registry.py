"""Register of functional optimizers, which ``DistributedOptimizer`` uses in place of torch's."""

from __future__ import annotations

from typing import Any

import torch.optim

from mpidist.optim.functional import optimizers

functional_optim_map: dict[Any, Any] = {
    torch.optim.SGD: optimizers.SGD,
    torch.optim.Adam: optimizers.Adam,
    torch.optim.AdamW: optimizers.AdamW,
    torch.optim.Adagrad: optimizers.Adagrad,
    torch.optim.Adadelta: optimizers.Adadelta,
    torch.optim.Adamax: optimizers.Adamax,
    torch.optim.RMSprop: optimizers.RMSprop,
    torch.optim.Rprop: optimizers.Rprop,
}
_NAMES = {functional.__name__: functional for functional in functional_optim_map.values()}


def register_functional_optim(key: Any, optim: Any) -> None:
    """Register a functional optimizer; a key that is registered stays as it is.

    Only the callers of ``DistributedOptimizer`` need to register it: the class goes along to the
    parameters' owners, which must be able to import it.

    Args:
        key: What users give ``DistributedOptimizer`` as ``optimizer_class``; need not be a class.
        optim: Called on each owner with its parameters, a list, and the optimizer's other
            arguments; the result has ``step(gradients)``, with one gradient a parameter or None.
            ``param_groups``, ``add_param_group``, ``state_dict`` and ``load_state_dict``, in
            torch's format, are used if present.
    """
    functional_optim_map.setdefault(key, optim)


def name_or_class(functional: Any) -> Any:
    """Return how a message names an optimizer: this library's by strings, which need no pickle."""
    name = getattr(functional, "__name__", "")
    return name if _NAMES.get(name) is functional else functional


def resolve(named: Any) -> Any:
    """Return the optimizer that a message names.

    Raises:
        ValueError: This library has none of that name.
    """
    if not isinstance(named, str):
        return named
    if named not in _NAMES:
        raise ValueError(
            f"mpidist.optim.functional has no optimizer {named!r}; it has {', '.join(_NAMES)}"
        )
    return _NAMES[named]
