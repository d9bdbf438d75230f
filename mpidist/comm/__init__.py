"""init → group → progress → collectives/p2p/objects → MPI. Importing it starts nothing; ``init()`` does."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "init": "group",
    "default": "group",
    "ProcessGroup": "group",
    "P2POp": "p2p",
    "PremulSum": "arithmetic",
    "SUM": "arithmetic",
    "AVG": "arithmetic",
    "PRODUCT": "arithmetic",
    "MIN": "arithmetic",
    "MAX": "arithmetic",
    "BAND": "arithmetic",
    "BOR": "arithmetic",
    "BXOR": "arithmetic",
    "device": "runtime",
    "local_rank": "runtime",
    "world": "runtime",
    "capabilities": "capability",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpidist.comm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mpidist.comm.{_HOMES[name]}"), name)
