"""Attributes of torch's ``DistributedDataParallel`` that programs read or call although torch does not document them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_MIB = 1024 * 1024
_IGNORED = "_ddp_ignored"


class TorchAttributes:
    """A base of ``DistributedDataParallel``; the names are torch's.

    Attributes:
        broadcast_bucket_size: Bytes of parameters and buffers that ``torch.distributed.utils._sync_module_states`` shall send
            together; our own broadcasts do not read it.
        bucket_bytes_cap: Bytes at which a bucket closes, the first of a module excepted.
        bucket_bytes_cap_list: ``bucket_cap_mb_list`` in bytes; empty without it.

    Source:
        ``torch/nn/parallel/distributed.py`` of torch 2.13.
    """

    broadcast_bucket_size = 250 * _MIB
    bucket_bytes_cap: int
    bucket_bytes_cap_list: list[int]
    reducer: Any

    def _keep_caps(self, limits: Sequence[int], bucket_cap_mb_list: Sequence[float] | None) -> None:
        self.bucket_bytes_cap = max(limits)
        self.bucket_bytes_cap_list = [int(cap * _MIB) for cap in bucket_cap_mb_list or ()]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: torch.nn.Module, names: Sequence[str]) -> None:
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in names:
                setattr(tensor, _IGNORED, True)

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters, or pairs with their names, that are not ignored.

        torch looks for its mark on the pairs, too, and so yields all of them.
        """
        for pair in module.named_parameters():
            if not hasattr(pair[1], _IGNORED):
                yield pair if named_params else pair[1]

    def _remove_autograd_hooks(self) -> None:
        """Leave the gradients of later backward passes alone; for a module that is to be wrapped anew."""
        self.reducer.remove_hooks()
