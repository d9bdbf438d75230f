"""Stand-in for torch's ``Backend`` object of one device of a group.

torch keeps a C++ ``Backend`` for each device type and queries its capabilities: Inductor, FSDP2,
``new_group(device_id=…)``. Python cannot derive from that class, so ``_get_backend`` of a group of
mpidist returns this object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from mpidist.c10d.shrinking import shrunk
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced


@untraced
class DeviceBackend:
    """Capabilities of a group, under the names of torch's ``Backend``.

    Attributes:
        supports_coalescing: Whether ``batch_isend_irecv`` needs one launch for all calls; MPI
            messages need none.
        supports_time_estimate: Whether Inductor can get a collective's duration without running it.
    """

    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def supports_shrinking(self) -> bool:
        """Permission of ``shrink_group``: not where other backends share the group."""
        return bool(self._group.supports_shrinking)

    @property
    def native(self) -> ProcessGroup:
        """The native group."""
        return self._group.native

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: object = None
    ) -> SimpleNamespace:
        """Return the native group of the ranks that remain, as ``native`` of a Backend's stand-in.

        torch hands it on to ``shrinking``.

        Collective: over the ranks that remain.
        """
        return SimpleNamespace(native=shrunk(self.native, ranks_to_exclude, shrink_flags))

    @property
    def supports_splitting(self) -> bool:
        """Permission of ``dist.split_group`` to divide the group.

        False where torch looks for a communicator that NCCL could split: if the default group is
        mpidist's and has a ``device_id``, ``new_group(backend="nccl")`` would pass this object to
        NCCL.
        """
        return sys._getframe(1).f_code.co_name != "_get_split_source"

    def name(self) -> str:
        """Return the backend's name, as ``dist.get_backend`` does."""
        return str(self._group.name())

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return int(self._group.rank())

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self._group.size())

    @property
    def options(self) -> None:
        """None: the backend has no options."""
        return None

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._group.native.timeout_s or 0)

    def set_timeout(self, timeout: timedelta) -> None:
        """See TorchProcessGroup.set_timeout."""
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """See Collectives.supports_tensor_alloc."""
        return bool(self._group.supports_tensor_alloc(device))

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """See Collectives.allocate_tensor."""
        allocated: torch.Tensor = self._group.allocate_tensor(size, dtype=dtype, device=device)
        return allocated

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Do nothing, because MPI has connected the ranks."""

    def _set_sequence_number_for_group(self) -> None:
        pass

    def abort(self) -> None:
        """See TorchProcessGroup.abort."""
        self._group.abort()

    def shutdown(self) -> None:
        """See TorchProcessGroup.shutdown."""
        self._group.shutdown()
