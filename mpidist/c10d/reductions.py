"""Translation of torch's ``ReduceOp`` and option objects into mpidist's reduce operations."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import ReduceOp

from mpidist.comm.algorithms import reduce_op
from mpidist.comm.algorithms.reduce_op import PremulSum
from mpidist.comm.algorithms.reduce_op import ReduceOp as NativeReduceOp


class Options(Protocol):
    """torch's option object of a collective."""

    asyncOp: bool
    timeout: timedelta


class Rooted(Options, Protocol):
    """torch's options of a gather or a scatter."""

    rootRank: int


class RootedTensor(Rooted, Protocol):
    """torch's options of a broadcast, or of a reduction to one rank."""

    rootTensor: int


class Reducing(Options, Protocol):
    """torch's options of a collective that reduces."""

    reduceOp: Any


_OPERATIONS: tuple[tuple[object, NativeReduceOp], ...] = (
    (ReduceOp.SUM, reduce_op.SUM),
    (ReduceOp.AVG, reduce_op.AVG),
    (ReduceOp.MAX, reduce_op.MAX),
    (ReduceOp.MIN, reduce_op.MIN),
    (ReduceOp.PRODUCT, reduce_op.PRODUCT),
    (ReduceOp.BAND, reduce_op.BAND),
    (ReduceOp.BOR, reduce_op.BOR),
    (ReduceOp.BXOR, reduce_op.BXOR),
)


def operation_of(op: Any) -> NativeReduceOp:
    """Translate torch's ReduceOp."""
    for requested, operation in _OPERATIONS:
        if op == requested:
            return operation
    if op == ReduceOp.PREMUL_SUM:
        factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
        return PremulSum(factor)
    raise ValueError(f"mpidist has no reduction {op}")


def requested_operation(opts: Reducing | None) -> NativeReduceOp:
    """Return the operation of an option object; SUM without one."""
    return operation_of(opts.reduceOp) if opts is not None else reduce_op.SUM
