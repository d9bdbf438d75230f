"""Settings of a data-parallel module by the attribute names of torch's.

Source: ``torch/nn/parallel/distributed.py`` of torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

from mpidist.comm.group_protocol import Group
from mpidist.ddp.layout import Settings
from mpidist.ddp.reducer import Reducer

Tensor = torch.Tensor


def _setting(name: str) -> Any:
    """Return a property for a flag of ``settings``."""
    return property(lambda self: bool(getattr(self.settings, name)))


class TorchSettings:
    """Settings by torch's names, read only; mixed into ``DistributedDataParallel``."""

    # Defined by the class that this one is mixed into.
    module: torch.nn.Module
    settings: Settings
    reducer: Reducer
    parameters_to_ignore: set[str]
    device: torch.device
    forward_sync_buffers: bool
    _group: Group

    mixed_precision = None
    batched_grad_copy = True  # gradients that need a copy are always copied together
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
    def _comm_hooks(self) -> list[tuple[Any, Any]]:
        return [] if self.reducer.hook is None else [self.reducer.hook]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self.reducer.layout.is_rebuilt)

    @property
    def _distributed_rank(self) -> int:
        return int(self._group.rank)
