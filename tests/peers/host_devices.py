"""Devices of the host under an accelerator's names, for programs that run on accelerators alone.

The functions are replaced for all threads, unlike those of ``tests.conformance.cuda_on_host``: RPC
calls a program's functions in threads of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.cuda_on_host import host_of

_HOST = torch.device("cpu")


def install(count: int) -> None:
    """Let torch report ``count`` accelerators, which are the host."""
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: count
    accelerator.current_accelerator = lambda check_available=False: _HOST
    cuda: Any = torch.cuda
    for module, names in (
        (accelerator, ("set_device_index", "synchronize")),
        (cuda, ("set_device", "synchronize", "empty_cache")),
    ):
        for name in names:
            setattr(module, name, _nothing())
    tensor: Any = torch.Tensor
    tensor.to = _first_argument_on_host(torch.Tensor.to)
    tensor.cuda = lambda self, *args, **kwargs: self.clone()
    tensor.pin_memory = lambda self, *args, **kwargs: self
    layer: Any = torch.nn.Module
    layer.to = _first_argument_on_host(torch.nn.Module.to)
    layer.cuda = lambda self, *args, **kwargs: self
    _without_device_ids(torch.nn.parallel.DistributedDataParallel)


def _nothing() -> Callable[..., None]:
    # One for each name: Dynamo keeps its rules by object.
    return lambda *args, **kwargs: None


def _first_argument_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (host_of(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = host_of(kwargs["device"])
        return function(self, *args, **kwargs)

    return on_host


def _without_device_ids(data_parallel: Any) -> None:
    construct = data_parallel.__init__

    @functools.wraps(construct)
    def on_host(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("output_device", None)
        construct(self, module, None, *args, **kwargs)

    data_parallel.__init__ = on_host
