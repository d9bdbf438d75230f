"""Bindings of torch's CUDA names to the host: CUDA tests on machines without a GPU.

Devices named cuda, or by number, become the CPU; streams, events and the current device do nothing.
A test that needs more of a GPU fails on any backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_HOST = torch.device("cpu")


def host_of(device: Any) -> Any:
    """Return the host for a CUDA device; return anything else unchanged."""
    if isinstance(device, torch.device):
        return _HOST if device.type == "cuda" else device
    if isinstance(device, str):
        return _HOST if device.startswith("cuda") else device
    return _HOST if isinstance(device, int) and not isinstance(device, bool) else device


class _OnHost(TorchFunctionMode):
    """Function mode that replaces CUDA devices in the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = host_of(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], host_of(args[1]), *args[2:])
        elif getattr(func, "__name__", "") == "_parse_to" and args:  # of Module.to
            args = (host_of(args[0]), *args[1:])
        elif func is torch.Tensor.cuda:
            return args[0].clone()
        return func(*args, **kwargs)


class _Nothing:
    """Stream or event of a device that executes synchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    synchronize = record = wait = wait_event = wait_stream = record_event = _do_nothing


@contextlib.contextmanager
def cuda_on_host() -> Iterator[None]:
    """Bind the names."""
    names = {
        name: _Nothing
        for name in ("Stream", "Event", "stream", "device", "current_stream", "default_stream")
    }
    calls = {
        name: lambda *args, **kwargs: None for name in ("set_device", "synchronize", "empty_cache")
    }
    module = mock.patch.object(torch.nn.Module, "cuda", lambda self, device=None: self)
    with (
        mock.patch.multiple(torch.cuda, **names, **calls, current_device=lambda: 0),
        module,
        _OnHost(),
    ):
        yield


def devices_of(ranks: int, backend: str) -> dict[int, list[int]]:
    """Return one device per rank, as torch's ``init_multigpu_helper`` does."""
    return {rank: [rank] for rank in range(ranks)}
