"""Training that outlives its ranks: job → recovery → roles, warm_up, neighbours."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'mpidist.elastic' has no attribute {name!r}")
    found = globals()[name] = importlib.import_module("mpidist.elastic.job").run
    return found
