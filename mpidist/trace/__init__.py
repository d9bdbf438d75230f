"""Timeline of all ranks: timeline → session → exchange, spool → events, arrows → one file.

``clocks`` are the ranks' offsets, ``chrome_file`` is the file's form; ``summary`` has its figures,
``torch_profiles`` lays profiles of torch beside it. An import of the package starts nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"merge": "torch_profiles", "record": "timeline"}
__all__ = ["merge", "record"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mpidist.trace' has no attribute {name!r}")
    found = globals()[name] = getattr(
        importlib.import_module(f"mpidist.trace.{_HOMES[name]}"), name
    )
    return found
