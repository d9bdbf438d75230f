"""Processes that a program starts by torch.multiprocessing, as calls in the ranks of its MPI job.

``spawn(f, args, nprocs)`` calls ``f(rank, *args)`` in each rank below ``nprocs``. ``Process`` of
the program itself runs its target at ``start``. A user writes the same call in the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.multiprocessing


class Call:
    """Process of a program that has run when ``start`` returns."""

    exitcode = 0

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}

    def start(self) -> None:
        """Call the target."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        """Return at once."""


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Call the function in each rank below ``nprocs``.

    Raises:
        ValueError: The job has too few ranks.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if nprocs > size:
        raise ValueError(f"spawn of {nprocs} processes in a job of {size} ranks")
    if rank < nprocs:
        fn(rank, *args)


def install() -> None:
    """Replace the names of torch.multiprocessing."""
    theirs: Any = torch.multiprocessing
    theirs.spawn = spawn
    process = theirs.Process

    def of_program(*args: Any, **kwargs: Any) -> Any:
        # torch's own processes (data loaders) stay processes.
        is_program = sys._getframe(1).f_globals.get("__name__") == "__main__"
        return (Call if is_program else process)(*args, **kwargs)

    theirs.Process = of_program
