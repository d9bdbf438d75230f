"""MPI's names of our reductions, and the one operation that MPI is given: a sum of narrow integers that wraps around.

MPI leaves open what a sum past its type's range is. Open MPI with AVX saturates sums of 8 and 16
bits (127 + 1 is 127), on some elements of a tensor and not on others; torch, Gloo, NCCL and our own
rings and shards compute modulo 2**bits. So MPI calls back for these sums, on every library: ranks
that gave it different operations might enter different algorithms. An exception of a signal handler
that runs in such a call ends the job: mpi4py cannot hand it through MPI.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpidist.comm.algorithms import reduce_op
from mpidist.comm.algorithms.reduce_op import Reduction
from mpidist.comm.memory import buffer
from mpidist.comm.mpi.library import MPI

_NARROW_INTEGERS = frozenset((torch.int8, torch.uint8, torch.int16, torch.uint16))


def types_of(dtype: torch.dtype, plan: Reduction) -> tuple[Any, Any]:
    """Return the datatype and the operation that MPI combines tensors of a dtype with."""
    if dtype is torch.bool:
        return buffer.datatypes()[dtype], _bool_operations()[plan.combine]
    if calls_back(dtype, plan):
        return buffer.datatypes()[dtype], _wrapping_sum(dtype.itemsize)
    return buffer.datatypes()[dtype], _operations()[plan.combine]


def calls_back(dtype: torch.dtype, plan: Reduction) -> bool:
    """Say whether MPI's operation is a Python function, which reads and writes host memory alone."""
    return plan.combine == reduce_op.SUM and dtype in _NARROW_INTEGERS


@functools.cache
def _wrapping_sum(itemsize: int) -> Any:
    # Modulo 2**bits the sum is the same for both signs, and MPI has room for few operations.
    return MPI.Op.Create(_adder(np.dtype(f"u{itemsize}")), commute=True)


def _adder(numbers: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    def add(mine: Any, total: Any, datatype: Any) -> None:
        held = np.frombuffer(total, numbers)
        np.add(held, np.frombuffer(mine, numbers), out=held)

    return add


@functools.cache
def _operations() -> dict[str, Any]:
    return {
        reduce_op.SUM: MPI.SUM,
        reduce_op.PRODUCT: MPI.PROD,
        reduce_op.MIN: MPI.MIN,
        reduce_op.MAX: MPI.MAX,
        reduce_op.BAND: MPI.BAND,
        reduce_op.BOR: MPI.BOR,
        reduce_op.BXOR: MPI.BXOR,
    }


@functools.cache
def _bool_operations() -> dict[str, Any]:
    # A sum of booleans is "any of them", as NCCL and torch's own convert it; a product is "all of
    # them".
    return {
        reduce_op.SUM: MPI.LOR,
        reduce_op.MAX: MPI.LOR,
        reduce_op.BOR: MPI.LOR,
        reduce_op.PRODUCT: MPI.LAND,
        reduce_op.MIN: MPI.LAND,
        reduce_op.BAND: MPI.LAND,
        reduce_op.BXOR: MPI.LXOR,
    }
