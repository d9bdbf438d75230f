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

    Args:
        group: The group, whose methods of the same names are those of this object.

    Attributes:
        native: The native group.
        options: None: the backend has no options.
        supports_coalescing: Whether ``batch_isend_irecv`` needs one launch for all calls; MPI
            messages need none.
        supports_shrinking: Permission of ``shrink_group``: not where other backends share the
            group.
        supports_time_estimate: Whether Inductor can get a collective's duration without running it.
    """

    options = None
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: Any) -> None:
        self.native: ProcessGroup = group.native
        self.supports_shrinking: bool = group.supports_shrinking
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self.set_timeout = self._set_default_timeout = group.set_timeout
        self.supports_tensor_alloc = group.supports_tensor_alloc
        self.allocate_tensor = group.allocate_tensor
        self._set_sequence_number_for_group = group._set_sequence_number_for_group
        self._get_sequence_number_for_group = group._get_sequence_number_for_group
        self.abort, self.shutdown = group.abort, group.shutdown

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

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.native.timeout_s or 0)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Do nothing, because MPI has connected the ranks."""
