"""RPC workers under test: contenders, called functions, and phases of the callee's main thread.

A call names its function by module and name, so that both ends import this module.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from itertools import repeat
from typing import Any

import torch

Tensor = torch.Tensor
_KI = 1 << 10

FLOODED = 50  # calls per caller


# mpidist between workers with a list of callable functions.
DATA_ONLY = "data only"


def noop() -> None:
    """Do nothing."""


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


def one() -> int:
    """Return 1, the value behind a reference."""
    return 1


def kept_tensor() -> Tensor:
    """Return an existing tensor of 1 KiB."""
    return KEPT


class Layer:
    """Part of a model without computation, so that only the call is timed."""

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor


def forward(rref: Any, tensor: Tensor) -> Tensor:
    """Call a layer on this worker through a reference: the forward call of a split model."""
    result: Tensor = rref.local_value().forward(tensor)
    return result


def forward_all(*, rref: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call a layer with each tensor of a dict; all arguments are keywords."""
    layer = rref.local_value()
    return {name: layer.forward(tensor) for name, tensor in tensors.items()}


def flood(module: str, to: str, calls: int) -> int:
    """Call ``noop`` on worker ``to`` repeatedly; each of many callers runs this."""
    rpc = modules()[module]
    for _ in repeat(None, calls):
        rpc.rpc_sync(to, noop)
    return calls


KEPT = torch.arange(_KI // 4, dtype=torch.float32)


_phases: queue.SimpleQueue[tuple[str, float, float]] = queue.SimpleQueue()


_shares: queue.SimpleQueue[float] = queue.SimpleQueue()


_busy = threading.Event()


def begin(phase: str, settle_s: float = 0.0, seconds: float = 0.0) -> None:
    """Start a phase of this worker's main thread; see ``follow_phases``."""
    if phase == "compute":
        _busy.set()
    _phases.put((phase, settle_s, seconds))


def end_of_phase() -> None:
    """End the computing of the main thread."""
    _busy.clear()


def idle_share() -> float:
    """Return the share of a core that this worker used in its idle phase."""
    return _shares.get(timeout=30)


def follow_phases() -> None:
    """Run the phases that ``begin`` requests, until ``leave``.

    ``compute`` runs Python code until ``end_of_phase``. ``idle`` sleeps for ``settle_s``, then
    measures for ``seconds`` the share of a core that the process uses, while no call arrives.
    """
    while (following := _phases.get())[0] != "leave":
        phase, settle_s, seconds = following
        if phase == "idle":
            time.sleep(settle_s)
            used, start = time.process_time(), time.perf_counter()
            time.sleep(seconds)
            _shares.put((time.process_time() - used) / (time.perf_counter() - start))
        while _busy.is_set():
            sum(range(2000))


def modules() -> dict[str, Any]:
    """Return the contenders by name."""
    import torch.distributed.rpc as tensorpipe

    import mpidist.rpc

    return {"mpidist": mpidist.rpc, DATA_ONLY: mpidist.rpc, "tensorpipe": tensorpipe}


def start(name: str, group: Any, device_map: dict[str, dict[Any, Any]] | None = None) -> Any:
    """Start a contender with workers ``worker0``, ``worker1``, …; return its module. Collective.

    Args:
        device_map: Devices of other workers for tensors on devices here, by worker.
    """
    rpc, worker = modules()[name], f"worker{group.rank}"
    if name != "tensorpipe":
        # With a list, workers read data only. The list covers all called functions.
        rpc.init_rpc(
            worker,
            allowed=[__name__, Layer, torch.add] if name == DATA_ONLY else None,
            rpc_backend_options=rpc.RpcBackendOptions(device_maps=device_map),
        )
        return rpc
    # A file rendezvous: a store over TCP does not survive a second start in one process.
    store = None
    if group.rank == 0:
        handle, store = tempfile.mkstemp()
        os.close(handle)
        os.remove(store)
    at = f"file://{group.broadcast_object(store)}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=at, device_maps=device_map)
    rpc.init_rpc(worker, rank=group.rank, world_size=group.size, rpc_backend_options=options)
    return rpc


def end(name: str, group: Any) -> None:
    """Shut a contender down. Collective."""
    rpc = modules()[name]
    # Otherwise TensorPipe prints a line per reference.
    if name == "tensorpipe":
        rpc.api._delete_all_user_and_unforked_owner_rrefs()
        time.sleep(0.5)
    group.barrier()
    # TensorPipe's graceful shutdown hangs the second time in one process.
    rpc.shutdown(graceful=name != "tensorpipe")
    group.barrier()
