"""Number of kernel launches per call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpidist.kernels import accumulate, pack, powersgd_launches


def most_launches(calls: Sequence[Callable[[], None]], device: torch.device) -> int | None:
    """Return the largest number of mpidist's kernels in one call; each call has one bucket."""
    if device.type != "cuda":
        return None
    most = 0
    for call in calls:
        with _recorded_launches() as launched:
            call()
        most = max(most, len(launched))
    return most


@contextmanager
def _recorded_launches() -> Iterator[list[str]]:
    """Record the names of mpidist's kernels launched within the block."""
    launched: list[str] = []
    modules: tuple[Any, ...] = (accumulate, pack, powersgd_launches)
    launch = powersgd_launches.launch

    def recorded(file: str, name: str, *args: Any, **options: Any) -> None:
        launched.append(name)
        launch(file, name, *args, **options)

    try:
        for module in modules:
            module.launch = recorded
        yield launched
    finally:
        for module in modules:
            module.launch = launch
