"""``torch.distributed.shrink_group`` for groups of mpidist.

torch asks the group's Backend for a smaller one, and puts it into a ProcessGroup of its own class,
of one device and of the backend type Gloo. A group of mpidist has two devices and methods of its
own, so the function that makes the new group is replaced for our Backends.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.c10d import generation
from mpidist.c10d.native import native_of
from mpidist.comm.group import ProcessGroup

ABORT = 1  # torch's SHRINK_ABORT


def shrunk(native: ProcessGroup, ranks_to_exclude: Sequence[int], flags: int) -> ProcessGroup:
    """Return the native group of the ranks that remain; see ``ProcessGroup.shrink``.

    Args:
        flags: torch's SHRINK_DEFAULT or SHRINK_ABORT.
    """
    return native.shrink(ranks_to_exclude, abort=flags == ABORT)


def install() -> None:
    """Let torch make groups of ours from our Backends, once per process."""
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    original = c10d._create_shrunk_process_group
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create(
        new_backend: Any,
        remaining_ranks: list[int],
        metadata: Mapping[str, Any],
        is_default_group: bool,
    ) -> Any:
        native = native_of(new_backend)
        if native is None:
            return original(new_backend, remaining_ranks, metadata, is_default_group)
        name = metadata["new_group_name"]
        store = c10d.PrefixStore(f"{name}/", metadata["store"])
        origin = getattr(new_backend, "origin", None)
        group = generation.group_of_torch(native, store, name, origin)
        group.bound_device_id = metadata.get("bound_device_id")
        former = "default" if is_default_group else metadata["original_group_name"]
        group._set_group_desc(f"{former}:shrunk")
        return group

    c10d._create_shrunk_process_group = create
