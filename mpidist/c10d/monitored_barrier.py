"""``torch.distributed.monitored_barrier`` for groups of ours; torch's own function refuses every backend but Gloo by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_installed: Callable[..., None] | None = None


def install() -> None:
    """Have the function call a group's own method where it is ours, under both names that torch has for it."""
    global _installed
    if _installed is None:
        import torch.distributed as dist

        c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
        _installed = _choosing(c10d.monitored_barrier)
        dist.monitored_barrier = c10d.monitored_barrier = _installed


def _choosing(torchs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        import torch.distributed as dist

        chosen: Any = group or dist.group.WORLD
        if hasattr(chosen, "native"):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            torchs(group, timeout, wait_all_ranks)

    return monitored_barrier
