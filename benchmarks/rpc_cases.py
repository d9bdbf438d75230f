"""What is called on the other worker, and the cases: each the same calls by mpidist.rpc and by torch's RPC over TensorPipe."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch

Tensor = torch.Tensor


def noop() -> None:
    """Do nothing."""


def echo(tensor: Tensor) -> Tensor:
    """Give back what came."""
    return tensor


def one() -> int:
    """Return 1: what a reference is made of."""
    return 1


def flood(module: str, to: str, calls: int) -> int:
    """Call ``noop`` on worker ``to``, one call after the other; run by each of many callers."""
    rpc = modules()[module]
    for _ in repeat(None, calls):
        rpc.rpc_sync(to, noop)
    return calls


phases: queue.SimpleQueue[str] = queue.SimpleQueue()
_busy = threading.Event()


def begin(phase: str) -> None:
    """Have this worker's main thread do something else: ``compute`` in Python until ``end_of_phase``, or ``leave``."""
    if phase == "compute":
        _busy.set()
    phases.put(phase)


def end_of_phase() -> None:
    """Let the main thread end what it does."""
    _busy.clear()


def follow_phases() -> None:
    """Do what ``begin`` says, until it says ``leave``; the main thread of workers that answer."""
    while phases.get() != "leave":
        while _busy.is_set():
            sum(range(2000))


def processor_seconds() -> float:
    """Return what this process has used of processors so far."""
    return time.process_time()


def modules() -> dict[str, Any]:
    """Return the contenders by name."""
    import torch.distributed.rpc as tensorpipe

    import mpidist.rpc

    return {"tensorpipe": tensorpipe, "mpidist": mpidist.rpc}


@dataclass(frozen=True)
class Case:
    """One way to use a worker.

    Attributes:
        name: For tables.
        size_bytes: Of the tensor that goes and comes; 0 for none.
        calls: How many calls one pass makes.
        run: (rpc, worker) makes one pass.
        is_right: (rpc, worker) says whether the result is.
    """

    name: str
    size_bytes: int
    calls: int
    run: Callable[[Any, str], object]
    is_right: Callable[[Any, str], bool]


def cases(sizes_bytes: tuple[int, ...], burst: int, callers: int) -> list[Case]:
    """Return the cases.

    Args:
        sizes_bytes: Of what is echoed.
        burst: Asynchronous calls under way at once.
        callers: Workers beside the first.
    """
    made = [Case("no-op", 0, 1, _noop, lambda rpc, to: rpc.rpc_sync(to, one) == 1)]
    for size in sizes_bytes:
        tensor = torch.arange(size // 4, dtype=torch.float32)
        made.append(Case("echo", size, 1, partial(_echo, tensor), partial(_is_echoed, tensor)))
    made.append(Case("async", 0, burst, partial(_async, burst), partial(_are_answered, burst)))
    made.append(Case("remote + to_here", 0, 1, _remote, lambda rpc, to: rpc.remote(to, one).to_here() == 1))
    flooded = 50
    made.append(Case("many to one", 0, callers * flooded, partial(_flooded, callers, flooded), partial(_is_flooded, callers)))
    return made


def _noop(rpc: Any, to: str) -> object:
    return rpc.rpc_sync(to, noop)


def _echo(tensor: Tensor, rpc: Any, to: str) -> object:
    return rpc.rpc_sync(to, echo, args=(tensor,))


def _is_echoed(tensor: Tensor, rpc: Any, to: str) -> bool:
    return torch.equal(rpc.rpc_sync(to, echo, args=(tensor,)), tensor)


def _async(count: int, rpc: Any, to: str) -> None:
    futures = [rpc.rpc_async(to, noop) for _ in repeat(None, count)]
    for future in futures:
        future.wait()


def _are_answered(count: int, rpc: Any, to: str) -> bool:
    futures = [rpc.rpc_async(to, one) for _ in repeat(None, count)]
    return sum(future.wait() for future in futures) == count


def _remote(rpc: Any, to: str) -> object:
    return rpc.remote(to, one).to_here()


def _flooded(callers: int, calls: int, rpc: Any, to: str) -> int:
    name = next(name for name, module in modules().items() if module is rpc)
    futures = [rpc.rpc_async(f"worker{rank + 1}", flood, args=(name, "worker0", calls)) for rank in range(callers)]
    return sum(future.wait() for future in futures)


def _is_flooded(callers: int, rpc: Any, to: str) -> bool:
    return _flooded(callers, 3, rpc, to) == 3 * callers
