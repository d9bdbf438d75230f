"""Resolution of a ``process_group`` argument to a native group."""

from __future__ import annotations

from typing import Any

from mpidist.comm import world_group
from mpidist.comm.group import ProcessGroup
from mpidist.comm.group_types import AnyGroup


def native_group(process_group: AnyGroup) -> ProcessGroup:
    """Return the native group that ``process_group`` is or wraps.

    Args:
        process_group: A native group, a torch group on the backend ``mpidist``, or None: torch's
            default group if its backend is ours, else the group of all ranks of the job.

    Raises:
        TypeError: A group of another backend.
    """
    if process_group is None:
        process_group = default_group()
    if isinstance(process_group, ProcessGroup):
        return process_group
    native = getattr(process_group, "native", None)
    if isinstance(native, ProcessGroup):
        return native
    raise TypeError(
        "this needs a group of mpidist: mpidist.comm.init(), or a torch group made with "
        'backend="mpidist"; '
        f"got {type(process_group).__name__}"
    )


def default_group() -> Any:
    """Return torch's default group if its backend is ours, else the native group of all ranks."""
    import torch.distributed as dist

    # A script that has called torch's init_process_group("mpidist") means that group.
    if dist.is_available() and dist.is_initialized():
        default = dist.group.WORLD
        if isinstance(getattr(default, "native", None), ProcessGroup):
            return default
    return world_group.init()
