"""Settings of a data-parallel module by the attribute names of torch's.

Source: ``torch/nn/parallel/distributed.py`` of torch 2.13.
"""

from __future__ import annotations

import torch

from mpidist.ddp.buffer_syncing import BufferSyncing
from mpidist.ddp.hooks.stages import Hook
from mpidist.ddp.layout import Settings

Tensor = torch.Tensor


def _setting(name: str) -> property:
    """Return a property for a flag of ``settings``."""
    return property(lambda self: bool(getattr(self.settings, name)))


class TorchSettings(BufferSyncing):
    """Settings by torch's names, read only; mixed into ``DistributedDataParallel``."""

    # Defined by the class that this one is mixed into.
    settings: Settings
    device: torch.device
    _has_cap_list: bool

    mixed_precision = None
    batched_grad_copy = True  # gradients that need a copy are always copied together
    lazy_bucket_allocation = False  # buckets are made once
    broadcast_bucket_size = 250 << 20
    is_multi_device_module = False
    _use_python_reducer = False
    _use_replicated_tensor_module = False
    _lazy_init_ran = True
    _ddp_sink_clone = True

    @property
    def broadcast_buffers(self) -> bool:
        """Return ``forward_sync_buffers``, by its former name in torch."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    find_unused_parameters = _setting("find_unused_parameters")
    static_graph = _setting("static_graph")
    gradient_as_bucket_view = _setting("gradient_as_bucket_view")
    skip_all_reduce_unused_params = _setting("skip_unused")

    @property
    def bucket_bytes_cap(self) -> int:
        """Return the bytes at which the last bucket closes."""
        return self.settings.limits[-1]

    bucket_bytes_cap_default = bucket_bytes_cap

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Return the limits of ``bucket_cap_mb_list`` in bytes; empty if there is none."""
        return list(self.settings.limits) if self._has_cap_list else []

    @property
    def device_type(self) -> str:
        """Return the device type of the parameters."""
        return self.device.type

    @property
    def _module_parameters(self) -> list[Tensor]:
        return [
            parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]

    @property
    def _comm_hooks(self) -> list[tuple[Hook, object]]:
        return [] if self.reducer.hook is None else [self.reducer.hook]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self.reducer.layout.is_rebuilt)

    @property
    def _distributed_rank(self) -> int:
        return int(self._group.rank)
