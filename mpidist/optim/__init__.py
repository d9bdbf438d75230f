"""Optimizers over remote parameters.

A step: ``distributed_optimizer`` → ``owner_calls`` ⇝ ``local`` on the owners → ``gradients`` of the
context → ``functional``, or ``grad_attribute`` for classes without a functional form.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DistributedOptimizer": "distributed_optimizer",
    "functional_optim_map": "registry",
    "register_functional_optim": "registry",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpidist.optim' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"mpidist.optim.{_HOMES[name]}"), name)
    return found
