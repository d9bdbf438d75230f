"""Synchronization of a module's buffers by a broadcast, in the forward pass."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mpidist.comm.group_types import Group
from mpidist.ddp.verification import broadcast_state
from mpidist.dynamo import untraced


class BufferSyncing:
    """Synchronization of one module's buffers.

    Args:
        module: The module.
        ignored: Names of buffers that stay each rank's own.
        is_enabled: Forward passes synchronize.

    Attributes:
        is_enabled: As the argument.
        is_due: The next forward pass synchronizes: the first, and each that follows an averaged
            one.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str], is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.is_due = True
        self._module = module
        self._ignored = ignored

    @untraced
    def sync(self, group: Group, root: int = 0) -> None:
        """Broadcast the buffers of the rank ``root``. Collective: over the group."""
        named = self._module.named_buffers()
        broadcast_state(group, [one for name, one in named if name not in self._ignored], root)
