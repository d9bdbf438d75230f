"""Hooks of torch that attach to a group in C++: the group's calls go by way of torch from then on.

``NanCheckHook`` and ``FlightRecorderHook`` see the calls that torch's own methods make. A group of
mpidist makes its calls without these, unless it is told that it is observed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_CLASSES = ("NanCheckHook", "FlightRecorderHook")


def install() -> None:
    """Let ``attach`` of each class tell a group that it is observed, once per process."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    for name in _CLASSES:
        hook = getattr(c10d, name, None)  # since torch 2.14
        if hook is not None and not hasattr(hook.attach, "__wrapped__"):
            hook.attach = staticmethod(_telling(hook.attach))


def _telling(attach: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attach)
    def told(pg: Any, *args: Any, **kwargs: Any) -> Any:
        observe = getattr(pg, "observe", None)
        if observe is not None:
            observe()
        return attach(pg, *args, **kwargs)

    return told
