"""Optimizers over remote parameters; the sharded optimizer by its public names (``mpidist.zero``).

A step: ``distributed_optimizer`` → ``remote_optimizers`` → ``owner_calls`` ⇝ ``local`` on the
owners → ``gradients`` of the context → ``functional``, or ``grad_attribute`` for classes without a
functional form.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DistributedOptimizer": "mpidist.optim.distributed_optimizer",
    "OSS": "mpidist.zero.optimizer",
    "ShardedGradScaler": "mpidist.zero.grad_scaler",
    "ZeroRedundancyOptimizer": "mpidist.zero.zero_redundancy",
    "functional_optim_map": "mpidist.optim.registry",
    "hook_with_zero_step": "mpidist.zero.zero_redundancy",
    "hook_with_zero_step_interleaved": "mpidist.zero.zero_redundancy",
    "register_functional_optim": "mpidist.optim.registry",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpidist.optim' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found
