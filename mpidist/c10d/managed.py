"""Calls of torch that name, ask, divide and end a group, without communicating over it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpidist.c10d import overrides
from mpidist.c10d.device_backend import DeviceBackend
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced


@untraced
class ManagedGroup(dist.ProcessGroup):
    """A ``torch.distributed.ProcessGroup`` without its collectives.

    Args:
        native: The group that does the work.
        store: The store that torch made the group with.
        name: torch's name of it.

    Attributes:
        native: The group that does the work; its methods are there for what torch's API lacks.
    """

    def __init__(self, native: ProcessGroup, store: Any, name: str) -> None:
        super().__init__(native.rank, native.size)  # type: ignore[call-arg]
        self.native = native
        self._store = store
        self._name = name

    def getBackendName(self) -> str:
        """See ProcessGroup.name."""
        return "mpidist"

    def name(self) -> str:
        """See ProcessGroup.name."""
        return "mpidist"

    @property
    def pg_name(self) -> str:
        """Name that torch gave the group."""
        return self._name

    @property
    def group_name(self) -> str:
        """Name that torch gave the group; kept here, because torch asks for it after its own tables have forgotten it."""
        return self._name

    def getGroupName(self) -> str:
        """See ProcessGroup.group_name; C++ asks by this name."""
        return self._name

    def get_group_store(self) -> Any:
        """Return the store that torch made the group with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes; ``dcp.async_save`` asks."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> DeviceBackend:
        # For a device of ours also where there is none: Inductor asks for CUDA's on any machine.
        if torch.device(device).type not in (held.type for held in self._device_types):
            raise RuntimeError(
                f'group "{self._name}": mpidist carries tensors of the CPU and of CUDA; got device '
                f"{device}"
            )
        return DeviceBackend(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change after how long the watchdog reports."""
        self.native.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Make a group of some of this group's ranks; ``torch.distributed.split_group`` calls it on GPU machines.

        Collective: over ``ranks``; others get None.

        Args:
            ranks: Ranks of this group; sorted in the new one.
            timeout: This group's if None.
            opts: Not used.
            group_name: Distinct from all others' names; made up if None.
            group_desc: For messages.
            device_types: Not used: the new group takes the same devices.
        """
        native = self.native.new_group(sorted(ranks), group_name, timeout)
        if native is None:
            return None
        child = type(self)(native, dist.PrefixStore(f"{native.name}/", self._store), native.name)
        if group_desc is not None:
            child._set_group_desc(group_desc)
        return child

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the ranks of an MPI job are known from its start.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self.native.where('merge_remote_group')} is not supported: start all ranks in one "
            "job of MPI"
        )

    def shutdown(self) -> None:
        """Close the group."""
        self.native.close()

    def coalesces(self, device: torch.device) -> bool:
        """Return whether messages on a device have to be started as one batch; MPI's need not."""
        return False

    def abort(self) -> None:
        """Make calls under way return with an error where MPI can, and refuse new ones."""
        from mpidist.errors import GroupError

        self.native.fail(GroupError(self.native.where("abort") + " was called"))
        self.native.revoke()

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See the native call."""
        self.native.monitored_barrier(timeout, wait_all_ranks)


overrides.override_monitored_barrier()
overrides.override_set_timeout()
