"""RPC cases: kinds of calls, their checks, and the series that each is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch

from rpc.workers import (
    FLOODED,
    KEPT,
    Layer,
    echo,
    flood,
    forward,
    forward_all,
    kept_tensor,
    modules,
    noop,
    one,
)

Tensor = torch.Tensor
_KI = 1 << 10
SMALL_BYTES = 64  # of each tensor in a message with many

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
    found = [Case("no-op", 0, 1, _sync(noop), lambda result: result is None, (FLOOR,))]
    for size in sizes_bytes:
        tensor = _floats(size)
        bare = ("ping-pong", SeriesKey("ping-pong", "echo", size))
        found.append(Case("echo", size, 1, _sync(echo, tensor), _is(tensor), (FLOOR, bare)))
    right = partial(_are_answered, burst)
    found.append(Case("async", 0, burst, partial(_async, burst), right, (FLOOR,)))
    found += [*_reference_cases(), *_many_cases(many)]
    right = partial(_is_flooded, callers)
    found.append(Case("many to one", 0, callers * FLOODED, partial(_flooded, callers), right))
    return found


def _reference_cases() -> list[Case]:
    """Return the cases that use references to values on the worker."""
    small, layer = _floats(_KI), _floats(4 * _KI)
    return [
        Case("remote + to_here", 0, 1, _remote(one), lambda result: result == 1, (FLOOR,), True),
        Case("remote + to_here", _KI, 1, _remote(kept_tensor), _is(KEPT), (FLOOR,), True),
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


def _many_cases(many: Sequence[int]) -> list[Case]:
    """Return the cases of many small tensors in one message."""
    # The largest count is compared with the second largest: in both the tensors dominate the cost.
    second = SMALL_BYTES * sorted(many)[-2]
    fewer = (("mpidist, fewer", SeriesKey("mpidist", "tensor of many", second)),)
    found = []
    for count in many:
        tensors = [torch.full((SMALL_BYTES // 4,), float(number)) for number in range(count)]
        here = fewer if count == max(many) else ()
        found.append(
            Case(
                "tensor of many",
                SMALL_BYTES * count,
                count,
                _sync(echo, tensors),
                _are(tensors),
                here,
            )
        )
    return found


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases whose operation contains one of the names; all without names.

    Cases that these are compared with are included.
    """
    if not names:
        return list(cases)
    named = [case for case in cases if any(name in case.operation for name in names)]
    needed = {
        (other.operation, other.size_bytes)
        for case in named
        for _, other in case.against
        if other.contender == "mpidist"
    }
    return [case for case in cases if case in named or (case.operation, case.size_bytes) in needed]


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
    args = (name, "worker0", FLOODED)

    def run() -> int:
        futures = [rpc.rpc_async(f"worker{rank + 1}", flood, args=args) for rank in range(callers)]
        return sum(future.wait() for future in futures)

    return run


def _is_flooded(callers: int, calls: int) -> bool:
    return calls == callers * FLOODED
