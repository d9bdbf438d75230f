"""torch's default group for a strategy, and a check of the strategy's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from mpidist.comm.world_group import native_group


def make_default_group(timeout: timedelta | None) -> None:
    """Initialize torch's default group on mpidist, unless there is one.

    Collective: over all ranks of the job.

    Raises:
        TypeError: The existing default group is of another backend.
    """
    if not dist.is_initialized():
        # mpi://, because env:// reads RANK and connects to MASTER_ADDR if a job script sets them.
        dist.init_process_group("mpidist", init_method="mpi://", timeout=timeout)
    native_group(dist.group.WORLD)


def require_mpidist(arguments: Mapping[str, object], strategy: type) -> None:
    """Require arguments of a strategy that fit mpidist (pure).

    Raises:
        ValueError: The backend is not ``"mpidist"``, or the launcher is not MPI's.
    """
    own = f"{strategy.__module__}.{strategy.__qualname__}"
    backend = arguments.get("process_group_backend")
    if backend not in (None, "mpidist"):
        raise ValueError(
            f"{own} makes its group on mpidist; got process_group_backend={backend!r}. Leave it "
            f"out, or use Lightning's own {strategy.__name__} for {backend}"
        )
    method = arguments.get("start_method", "popen")
    if method != "popen":
        raise ValueError(
            f"{own} runs on the ranks that mpirun or srun has started; leave "
            f"start_method={method!r} out"
        )
