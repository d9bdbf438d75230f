"""Communication: init → group → collectives/p2p/objects → execution → MPI.

The import starts nothing; ``init()`` starts MPI.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpidist.gc_pause import collector_paused

_HOMES = {
    "init": "world_group",
    "default": "world_group",
    "ProcessGroup": "group",
    "P2POp": "messages.p2p",
    "PremulSum": "algorithms.reduce_op",
    "SUM": "algorithms.reduce_op",
    "AVG": "algorithms.reduce_op",
    "PRODUCT": "algorithms.reduce_op",
    "MIN": "algorithms.reduce_op",
    "MAX": "algorithms.reduce_op",
    "BAND": "algorithms.reduce_op",
    "BOR": "algorithms.reduce_op",
    "BXOR": "algorithms.reduce_op",
    "couple": "coupling.coupling",
    "device": "mpi.runtime",
    "local_rank": "mpi.runtime",
    "world": "mpi.runtime",
    "capabilities": "discovery.capability",
    "without_launcher": "mpi.launcher_env",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpidist.comm' has no attribute {name!r}")
    with collector_paused():
        return getattr(importlib.import_module(f"mpidist.comm.{_HOMES[name]}"), name)
