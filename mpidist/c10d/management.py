"""Management calls of torch's groups and Backends: timeout, memory, shutdown, other groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mpidist.c10d import generation
from mpidist.c10d.native import KEY
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced
from mpidist.errors import GroupError


@untraced
class Management:
    """torch's methods that manage a group or its Backend.

    Attributes:
        native: The native group.
    """

    native: ProcessGroup

    def name(self) -> str:
        """Return the backend's name, as ``dist.get_backend`` does."""
        return "mpidist"

    getBackendName = name

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout after which the watchdog reports."""
        self.native.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the numbers of all ranks begin at 0."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has issued on the group."""
        return self.native.issued

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether ``allocate_tensor`` has memory for the group's collectives on a device."""
        return torch.device(device).type == "cpu" and self.native.allocates_node_memory

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a tensor of ``size`` elements in node memory; see ``ProcessGroup.allocate``.

        For callers in Python (FSDP2): torch has no way from C++ to a Python class here.

        Collective: the first call, over the group.

        Raises:
            ValueError: Not the CPU.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"{self.native.where('allocate_tensor')} has memory on the CPU alone; got {device}"
            )
        return self.native.allocate(size, dtype)

    def abort(self) -> None:
        """Fail new calls; running calls return with an error if the MPI library has ULFM."""
        self.native.fail(GroupError(self.native.where("abort") + " was called"))
        self.native.revoke()

    def shutdown(self) -> None:
        """Close the group."""
        self.native.close()


@untraced
class GroupManagement(Management):
    """torch's methods that manage a group alone, and copies: what holds a group shares it."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Create a group of some ranks; see ``torch.distributed.split_group``.

        Collective: over ``ranks``; other ranks get None.

        Args:
            ranks: Ranks of this group, in the new group's order; before torch 2.14, whose own
                split sorts them, in ascending order.
            timeout: Timeout of the new group; None for this group's.
            opts: Not used.
            group_name: Unique name; None for a generated one.
            group_desc: Description for messages.
            device_types: Not used: the new group supports the same devices.
        """
        ordered = ranks if generation.HAS_BACKENDS else sorted(ranks)
        native = self.native.new_group(ordered, group_name, timeout, key=KEY)
        if native is None:
            return None
        own: Any = self
        store = dist.PrefixStore(f"{native.name}/", own.get_group_store())
        child = generation.group_class()(native, store, native.name)
        if group_desc is not None:
            child._set_group_desc(group_desc)
        return child

    def merge_remote_group(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, because the ranks of an MPI job are fixed at its start.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self.native.where('merge_remote_group')} is not supported: start all ranks in one "
            "job of MPI"
        )

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See ``ProcessGroup.monitored_barrier`` of ``comm/group``."""
        self.native.monitored_barrier(timeout, wait_all_ranks)
