"""Profiler events of calls: ``rpc_sync#function(worker0 -> worker1)`` in ``torch.profiler``.

torch's own RPC records these events only in its old profiler (``torch.autograd.profiler_legacy``).
The event of ``rpc_sync`` ends with the result; those of ``rpc_async`` and ``remote`` end when the
request is sent. The callee's work is in the callee's own profile.

Source: names in torch/distributed/rpc/internal.py, _build_rpc_profiling_key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from mpidist.rpc.worker import Workers

P = ParamSpec("P")
T = TypeVar("T")


def record_calls(
    call: Callable[P, T], kind: str, function: object, workers: Workers, to: int
) -> Callable[P, T]:
    """Wrap a function that makes calls, so that each call is an event of the calling thread.

    Args:
        call: Makes a call.
        kind: ``"sync"``, ``"async"`` or ``"remote"``.
        function: The function to call.
        workers: All workers.
        to: The callee's rank.
    """
    event = f"rpc_{kind}#{_name(function)}({workers.me.name} -> {workers.infos[to].name})"

    def call_recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C._profiler._RecordFunctionFast(event):
            return call(*args, **kwargs)

    return call_recorded


def _name(function: object) -> str:
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    builtin = torch.jit._builtins._find_builtin(function)
    return builtin or getattr(function, "__qualname__", None) or type(function).__qualname__
