"""Overrides of functions in ``torch.distributed`` that accept groups of torch's own classes only.

``monitored_barrier`` refuses every backend but Gloo by its name, and ``_set_pg_timeout`` changes
the timeouts of Gloo and NCCL alone. An override calls the group's own method for a group of
mpidist, and torch's function for every other group.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpidist.c10d.native import native_of

if TYPE_CHECKING:
    import torch.distributed as dist

Function = Callable[..., Any]

_overridden: set[str] = set()


def override(name: str, wrapper: Callable[[Function], Function]) -> None:
    """Replace a function of ``distributed_c10d``, once per process.

    Args:
        name: The function's name; ``torch.distributed`` may have the function under this name, too.
        wrapper: Receives torch's function and returns the replacement.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    if name in _overridden or not hasattr(c10d, name):
        return
    _overridden.add(name)
    replacement = wrapper(getattr(c10d, name))
    for module in (c10d, importlib.import_module("torch.distributed")):
        if hasattr(module, name):
            setattr(module, name, replacement)


def install() -> None:
    """Let ``monitored_barrier`` and ``_set_pg_timeout`` take groups of mpidist."""
    override("monitored_barrier", _monitored_barrier)
    override("_set_pg_timeout", _set_timeout)


def _monitored_barrier(original: Function) -> Function:
    @functools.wraps(original)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        import torch.distributed as dist

        chosen: Any = group or dist.group.WORLD
        if native_of(chosen) is not None:
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    return monitored_barrier


def _set_timeout(original: Function) -> Function:
    @functools.wraps(original)
    def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        from torch.distributed import distributed_c10d

        chosen = distributed_c10d._get_default_group() if group is None else group
        if native_of(chosen) is not None:
            chosen.set_timeout(timeout)
        else:
            original(timeout, group)

    return _set_pg_timeout
