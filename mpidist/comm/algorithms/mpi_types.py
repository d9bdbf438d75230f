"""MPI datatypes and operations for torch dtypes and reductions.

Sums of narrow integers wrap around, by an operation of this library. MPI leaves open what a sum
past its type's range is: Open MPI with AVX saturates sums of 8 and 16 bits (127 + 1 is 127), on
some elements of a tensor and not on others; torch, Gloo, NCCL and this library's own algorithms
compute modulo 2**bits. So MPI calls a Python function for these sums, on every library, because
ranks with different operations might enter different algorithms. An exception of a signal handler
that runs in such a call ends the job: mpi4py cannot pass it through MPI.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpidist.comm.algorithms import reduce_op
from mpidist.comm.algorithms.reduce_op import Reduction
from mpidist.comm.mpi.library import MPI

_NARROW_INTEGERS = frozenset((torch.int8, torch.uint8, torch.int16, torch.uint16))


@functools.cache
def datatypes() -> dict[torch.dtype, MPI.Datatype]:
    """Return MPI's datatype of each dtype that MPI can reduce; all others move as bytes."""
    return {
        torch.bool: MPI.C_BOOL,
        torch.uint8: MPI.UINT8_T,
        torch.uint16: MPI.UINT16_T,
        torch.uint32: MPI.UINT32_T,
        torch.uint64: MPI.UINT64_T,
        torch.int8: MPI.INT8_T,
        torch.int16: MPI.INT16_T,
        torch.int32: MPI.INT32_T,
        torch.int64: MPI.INT64_T,
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.complex64: MPI.C_FLOAT_COMPLEX,
        torch.complex128: MPI.C_DOUBLE_COMPLEX,
    }


def datatype_and_op(dtype: torch.dtype, plan: Reduction) -> tuple[MPI.Datatype, MPI.Op]:
    """Return the MPI datatype and operation for a reduction of a dtype in ``datatypes``."""
    datatype = datatypes()[dtype]
    if dtype is torch.bool:
        return datatype, _bool_operations()[plan.combine]
    if is_callback(dtype, plan):
        return datatype, _wrapping_sum(dtype.itemsize)
    return datatype, _operations()[plan.combine]


def is_callback(dtype: torch.dtype, plan: Reduction) -> bool:
    """Return whether MPI's operation is a Python function, which can access host memory only."""
    return plan.combine == reduce_op.SUM and dtype in _NARROW_INTEGERS


@functools.cache
def _wrapping_sum(itemsize: int) -> MPI.Op:
    # Modulo 2**bits the sum is the same for both signs, and MPI has room for few operations.
    return MPI.Op.Create(_adder(np.dtype(f"u{itemsize}")), commute=True)


def _adder(numbers: np.dtype[np.unsignedinteger]) -> Callable[..., None]:
    def add(contribution: Any, total: Any, datatype: MPI.Datatype) -> None:
        out = np.frombuffer(total, numbers)
        np.add(out, np.frombuffer(contribution, numbers), out=out)

    return add


@functools.cache
def _operations() -> dict[str, MPI.Op]:
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
def _bool_operations() -> dict[str, MPI.Op]:
    # A sum of booleans is a logical or, as NCCL and torch's own backends convert it; a product is a
    # logical and.
    return {
        reduce_op.SUM: MPI.LOR,
        reduce_op.MAX: MPI.LOR,
        reduce_op.BOR: MPI.LOR,
        reduce_op.PRODUCT: MPI.LAND,
        reduce_op.MIN: MPI.LAND,
        reduce_op.BAND: MPI.LAND,
        reduce_op.BXOR: MPI.LXOR,
    }
