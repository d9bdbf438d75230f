"""MPI's names of our reductions."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mpidist.comm import arithmetic, buffer
from mpidist.comm.arithmetic import Reduction
from mpidist.comm.library import MPI


def types_of(dtype: torch.dtype, plan: Reduction) -> tuple[Any, Any]:
    """Return the datatype and the operation that MPI combines tensors of a dtype with."""
    if dtype is torch.bool:
        return buffer.datatypes()[dtype], _bool_operations()[plan.combine]
    return buffer.datatypes()[dtype], _operations()[plan.combine]


@functools.cache
def _operations() -> dict[str, Any]:
    return {
        arithmetic.SUM: MPI.SUM,
        arithmetic.PRODUCT: MPI.PROD,
        arithmetic.MIN: MPI.MIN,
        arithmetic.MAX: MPI.MAX,
        arithmetic.BAND: MPI.BAND,
        arithmetic.BOR: MPI.BOR,
        arithmetic.BXOR: MPI.BXOR,
    }


@functools.cache
def _bool_operations() -> dict[str, Any]:
    # A sum of booleans is "any of them", as NCCL and torch's own convert it; a product is "all of them".
    return {
        arithmetic.SUM: MPI.LOR,
        arithmetic.MAX: MPI.LOR,
        arithmetic.BOR: MPI.LOR,
        arithmetic.PRODUCT: MPI.LAND,
        arithmetic.MIN: MPI.LAND,
        arithmetic.BAND: MPI.LAND,
        arithmetic.BXOR: MPI.LXOR,
    }
