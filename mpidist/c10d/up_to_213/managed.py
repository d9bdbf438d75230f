"""Management calls of a torch process group: names, timeouts, backends, splitting, shutdown."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from mpidist.c10d.native import KEY
from mpidist.c10d.up_to_213 import overrides
from mpidist.c10d.up_to_213.device_backend import DeviceBackend
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced


@untraced
class ManagedGroup(dist.ProcessGroup):
    """A ``torch.distributed.ProcessGroup`` on MPI without its collectives.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.

    Attributes:
        native: The native group, whose methods torch's API partly lacks.
        supports_shrinking: Whether ``shrink_group`` can leave ranks out.
    """

    supports_shrinking = True

    def __init__(self, native: ProcessGroup, store: dist.Store, name: str) -> None:
        super().__init__(native.rank, native.size)  # type: ignore[call-arg]
        self.native = native
        self._store = store
        self._name = name

    def name(self) -> str:
        """See ProcessGroup.name."""
        return "mpidist"

    getBackendName = name

    @property
    def pg_name(self) -> str:
        """Name of the group in torch."""
        return self._name

    @property
    def group_name(self) -> str:
        """Name of the group in torch; torch reads it after its own tables have dropped it."""
        return self._name

    def getGroupName(self) -> str:
        """See ProcessGroup.group_name; C++ uses this name."""
        return self._name

    def get_group_store(self) -> dist.Store:
        """Return the store that torch created the group with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """Supported devices; ``dcp.async_save`` reads them."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> DeviceBackend:
        # Inductor requests CUDA's backend on machines without CUDA, too.
        if torch.device(device).type not in (held.type for held in self._device_types):
            raise RuntimeError(
                f'group "{self._name}": mpidist carries tensors of the CPU and of CUDA; got device '
                f"{device}"
            )
        return DeviceBackend(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout after which the watchdog reports."""
        self.native.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ManagedGroup | None:
        """Create a group of some ranks; ``torch.distributed.split_group`` calls it with a GPU.

        Collective: over ``ranks``; other ranks get None.

        Args:
            ranks: Ranks of this group; the new group has them in ascending order.
            timeout: Timeout of the new group; None for this group's.
            opts: Not used.
            group_name: Unique name; None for a generated one.
            group_desc: Description for messages.
            device_types: Not used: the new group supports the same devices.
        """
        native = self.native.new_group(sorted(ranks), group_name, timeout, key=KEY)
        if native is None:
            return None
        child = type(self)(native, dist.PrefixStore(f"{native.name}/", self._store), native.name)
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

    def shutdown(self) -> None:
        """Close the group."""
        self.native.close()

    def coalesces(self, device: torch.device) -> bool:
        """Return whether the messages of a batch on a device must be launched together."""
        return False

    def abort(self) -> None:
        """Fail new calls; running calls return with an error if the MPI library has ULFM."""
        from mpidist.errors import GroupError

        self.native.fail(GroupError(self.native.where("abort") + " was called"))
        self.native.revoke()

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See ``ProcessGroup.monitored_barrier`` of ``comm/group``."""
        self.native.monitored_barrier(timeout, wait_all_ranks)


overrides.install()
