"""RPC cases for mpidist and TensorPipe: called functions, phases of the callee, contenders."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch

Tensor = torch.Tensor
_KI = 1 << 10
SMALL_BYTES = 64  # of each tensor in a message with many
_FLOODED = 50  # calls per caller
# mpidist between workers with a list of callable functions.
DATA_ONLY = "data only"

# Called functions. A call names its function by module and name, so they are defined here.


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
    return _KEPT


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


_KEPT = torch.arange(_KI // 4, dtype=torch.float32)

# Phases of the main thread of a worker that answers calls.

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


# Contenders.


def modules() -> dict[str, Any]:
    """Return the contenders by name."""
    import torch.distributed.rpc as tensorpipe

    import mpidist.rpc

    return {"mpidist": mpidist.rpc, DATA_ONLY: mpidist.rpc, "tensorpipe": tensorpipe}


def start(name: str, group: Any) -> Any:
    """Start a contender, with workers ``worker0``, ``worker1``, …; return its module. Collective."""
    rpc, worker = modules()[name], f"worker{group.rank}"
    if name != "tensorpipe":
        # With a list, workers read data only. The list covers all called functions.
        rpc.init_rpc(
            worker, allowed=[f"{__name__}.*", Layer, torch.add] if name == DATA_ONLY else None
        )
        return rpc
    # A file rendezvous: a store over TCP does not survive a second start in one process.
    store = None
    if group.rank == 0:
        handle, store = tempfile.mkstemp()
        os.close(handle)
        os.remove(store)
    at = f"file://{group.broadcast_object(store)}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=at)
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


# Cases.

Pass = Callable[[], Any]


@dataclass(frozen=True)
class SeriesKey:
    """Identity of a series: the contender, the operation and the size."""

    contender: str
    operation: str
    size_bytes: int

    @property
    def case(self) -> tuple[str, int]:
        """Operation and size."""
        return self.operation, self.size_bytes


@dataclass(frozen=True)
class Case:
    """One kind of call.

    Attributes:
        operation: Name in tables.
        size_bytes: Size of the argument or the result; 0 if negligible.
        calls: Calls in one pass.
        make: ``make(rpc, worker)`` returns one pass.
        is_right: Returns whether a pass's result is correct.
        against: Series that are compared with this case, by label.
        has_references: Whether the case uses references to values on the worker.
    """

    operation: str
    size_bytes: int
    calls: int
    make: Callable[[Any, str], Pass]
    is_right: Callable[[Any], bool]
    against: tuple[tuple[str, SeriesKey], ...] = ()
    has_references: bool = False

    def key(self, contender: str) -> SeriesKey:
        """Return the key of a contender's series of this case."""
        return SeriesKey(contender, self.operation, self.size_bytes)


FLOOR = ("floor", SeriesKey("floor", "no-op", 0))
NOOP = ("mpidist no-op", SeriesKey("mpidist", "no-op", 0))


def cases(sizes_bytes: Sequence[int], burst: int, callers: int, many: Sequence[int]) -> list[Case]:
    """Return the cases.

    Args:
        sizes_bytes: Sizes of echoed tensors.
        burst: Pending asynchronous calls.
        callers: Workers except the first.
        many: Numbers of small tensors in one message; at least two.
    """
    made = [Case("no-op", 0, 1, _sync(noop), lambda result: result is None, (FLOOR,))]
    for size in sizes_bytes:
        tensor = _floats(size)
        bare = ("ping-pong", SeriesKey("ping-pong", "echo", size))
        made.append(Case("echo", size, 1, _sync(echo, tensor), _is(tensor), (FLOOR, bare)))
    kept, small, layer = _KEPT, _floats(_KI), _floats(4 * _KI)
    right = partial(_are_answered, burst)
    made += [
        Case("async", 0, burst, partial(_async, burst), right, (FLOOR,)),
        Case("remote + to_here", 0, 1, _remote(one), lambda result: result == 1, (FLOOR,), True),
        Case("remote + to_here", _KI, 1, _remote(kept_tensor), _is(kept), (FLOOR,), True),
        Case(
            "remote of torch.add + to_here",
            _KI,
            1,
            _remote(torch.add, small, 1),
            _is(small + 1),
            (FLOOR,),
            True,
        ),
        Case(
            "RRef and tensor", 4 * _KI, 1, partial(_forward, layer), _is(layer), (NOOP, FLOOR), True
        ),
        Case(
            "RRef and dict",
            4 * _KI,
            1,
            partial(_forward_all, layer),
            _are_halves(layer),
            (NOOP,),
            True,
        ),
        Case("rref.rpc_sync()", 4 * _KI, 1, partial(_proxy, layer), _is(layer), (NOOP,), True),
    ]
    # The largest count is compared with the second largest: in both the tensors dominate the cost.
    second = SMALL_BYTES * sorted(many)[-2]
    fewer = (("mpidist, fewer", SeriesKey("mpidist", "tensor of many", second)),)
    for count in many:
        tensors = [torch.full((SMALL_BYTES // 4,), float(number)) for number in range(count)]
        here = fewer if count == max(many) else ()
        made.append(
            Case(
                "tensor of many",
                SMALL_BYTES * count,
                count,
                _sync(echo, tensors),
                _are(tensors),
                here,
            )
        )
    right = partial(_is_flooded, callers)
    made.append(Case("many to one", 0, callers * _FLOODED, partial(_flooded, callers), right))
    return made


def chosen(made: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases whose operation contains one of the names; all without names.

    Cases that these are compared with are included.
    """
    if not names:
        return list(made)
    taken = [case for case in made if any(name in case.operation for name in names)]
    needed = {
        (other.operation, other.size_bytes)
        for case in taken
        for _, other in case.against
        if other.contender == "mpidist"
    }
    return [case for case in made if case in taken or (case.operation, case.size_bytes) in needed]


def _floats(size_bytes: int) -> Tensor:
    return torch.arange(size_bytes // 4, dtype=torch.float32)


def _is(tensor: Tensor) -> Callable[[Any], bool]:
    return lambda result: torch.equal(result, tensor)


def _are(tensors: list[Tensor]) -> Callable[[Any], bool]:
    return lambda result: len(result) == len(tensors) and all(map(torch.equal, result, tensors))


def _are_halves(tensor: Tensor) -> Callable[[Any], bool]:
    return lambda result: (
        list(result) == ["first", "second"]
        and torch.equal(torch.cat(list(result.values())), tensor)
    )


def _sync(function: Callable[..., Any], *args: Any) -> Callable[[Any, str], Pass]:
    return lambda rpc, to: lambda: rpc.rpc_sync(to, function, args=args)


def _async(count: int, rpc: Any, to: str) -> Pass:
    def run() -> list[Any]:
        futures = [rpc.rpc_async(to, noop) for _ in repeat(None, count)]
        return [future.wait() for future in futures]

    return run


def _are_answered(count: int, results: list[Any]) -> bool:
    return results == [None] * count


def _remote(function: Callable[..., Any], *args: Any) -> Callable[[Any, str], Pass]:
    return lambda rpc, to: lambda: rpc.remote(to, function, args=args).to_here()


def _forward(tensor: Tensor, rpc: Any, to: str) -> Pass:
    layer = rpc.remote(to, Layer)
    return lambda: rpc.rpc_sync(to, forward, args=(layer, tensor))


def _forward_all(tensor: Tensor, rpc: Any, to: str) -> Pass:
    layer = rpc.remote(to, Layer)
    first, second = (half.clone() for half in tensor.chunk(2))
    return lambda: rpc.rpc_sync(
        to, forward_all, kwargs={"rref": layer, "tensors": {"first": first, "second": second}}
    )


def _proxy(tensor: Tensor, rpc: Any, to: str) -> Pass:
    layer = rpc.remote(to, Layer)
    return lambda: layer.rpc_sync().forward(tensor)


def _flooded(callers: int, rpc: Any, to: str) -> Pass:
    name = next(name for name, module in modules().items() if module is rpc)
    args = (name, "worker0", _FLOODED)

    def run() -> int:
        futures = [rpc.rpc_async(f"worker{rank + 1}", flood, args=args) for rank in range(callers)]
        return sum(future.wait() for future in futures)

    return run


def _is_flooded(callers: int, calls: int) -> bool:
    return calls == callers * _FLOODED
