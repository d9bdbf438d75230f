"""Mixed groups for torch 2.11 to 2.13: what torch asks of them in place of their Backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from mpidist.c10d import mixed
from mpidist.c10d.names import OURS
from mpidist.c10d.routing import route
from mpidist.c10d.up_to_213 import batches
from mpidist.c10d.up_to_213.process_group import OLD_NAMES, TorchProcessGroup
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced

# Methods that torch calls on the default backend of its own groups.
_FORWARDED = (
    "_enable_collectives_timing",
    "_has_hooks",
    "_register_on_completion_hook",
    "_wait_for_pending_works",
)


@untraced
class MixedProcessGroup(mixed.MixedProcessGroup):
    """See ``MixedProcessGroup`` of ``c10d/mixed``."""

    supports_shrinking = False  # the other backends would keep all ranks

    def __init__(
        self,
        native: ProcessGroup,
        store: Store,
        name: str,
        backends: Mapping[str, str],
        others: Mapping[str, tuple[Any, Any]],
    ) -> None:
        super().__init__(native, store, name, backends, others)
        if "nccl" in others:
            batches.install()

    @property
    def _device_types(self) -> list[torch.device]:
        """Supported devices."""
        return [torch.device(device) for device in self._names]

    def _get_backend(self, device: torch.device) -> Any:
        if self._names.get(torch.device(device).type, OURS) == OURS:
            return super()._get_backend(device)
        return self._torch_group()._get_backend(device)

    def coalesces(self, device: torch.device) -> bool:
        """Return whether the messages of a batch on a device must be launched together."""
        return not self._is_ours(device.type) and bool(
            self._get_backend(device).supports_coalescing
        )


def _forwarded(name: str) -> Callable[..., object]:
    @untraced
    def call(self: MixedProcessGroup, *args: object, **kwargs: object) -> object:
        return getattr(self._torch_group(), name)(*args, **kwargs)

    return call


route(MixedProcessGroup, TorchProcessGroup, OLD_NAMES)
for _name in _FORWARDED:
    setattr(MixedProcessGroup, _name, _forwarded(_name))
