"""Hooks of torch in C++, on a group of mpidist: those of a group, and those of torch's DDP.

``NanCheckHook`` and ``FlightRecorderHook`` see the calls that torch's own methods make. A group of
mpidist makes its calls without these, unless it is told that it is observed.

DDP's built-in hook of half precision takes the value of a work's future for a list of C++. The
future of a work in Python has an object of Python, which torch's hook of the same arithmetic in
Python takes.

Source: torch/csrc/distributed/c10d/default_comm_hooks.cpp.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mpidist.c10d.native import native_of

_CLASSES = ("NanCheckHook", "FlightRecorderHook")


def install() -> None:
    """Replace torch's functions that attach and register these hooks, once per process."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    for name in _CLASSES:
        hook = getattr(c10d, name, None)  # since torch 2.14
        if hook is not None and not hasattr(hook.attach, "__wrapped__"):
            hook.attach = staticmethod(_telling(hook.attach))
    ddp: Any = importlib.import_module("torch.nn.parallel.distributed").DistributedDataParallel
    if not hasattr(ddp._register_builtin_comm_hook, "__wrapped__"):
        ddp._register_builtin_comm_hook = _registering(ddp._register_builtin_comm_hook)


def _telling(attach: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attach)
    def told(pg: Any, *args: Any, **kwargs: Any) -> Any:
        observe = getattr(pg, "observe", None)
        if observe is not None:
            observe()
        return attach(pg, *args, **kwargs)

    return told


def _registering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def register(self: Any, comm_hook_type: Any) -> None:
        import torch.distributed as dist

        halves = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if not halves or native_of(self.process_group) is None:
            original(self, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        self.logger._set_comm_hook_name(str(comm_hook_type))
        dist._register_comm_hook(self.reducer, self.process_group, fp16_compress_hook)

    return register
