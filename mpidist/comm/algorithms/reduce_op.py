"""Reduction operations: the plan for a dtype and an operation, and arithmetic that MPI lacks.

Names of torch's ``ReduceOp``: SUM AVG PRODUCT MIN MAX BAND BOR BXOR, and PREMUL_SUM, which
multiplies each rank's contribution by that rank's factor before the sum. Here an operation is a
string (``SUM = "sum"`` …) or a ``PremulSum``.
"""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SUM, AVG, PRODUCT, MIN, MAX = "sum", "avg", "product", "min", "max"
BAND, BOR, BXOR = "band", "bor", "bxor"
OPERATIONS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)


@dataclass(frozen=True)
class PremulSum:
    """SUM of each rank's tensor times its ``factor`` (a number, or a tensor of one element)."""

    factor: Any

    def __post_init__(self) -> None:
        # Read by the issuing thread: the executing thread's stream does not wait for the work that
        # computes the factor.
        factor = self.factor
        if isinstance(factor, torch.Tensor) and factor.numel() == 1:
            factor = factor.item()
        if not isinstance(factor, numbers.Number):
            raise TypeError(
                f"PremulSum needs a number, or a tensor of one element; got {self.factor!r}"
            )
        object.__setattr__(self, "factor", factor)

    def __str__(self) -> str:
        # Without the factor: ranks may have different factors, and compare this text.
        return "premul_sum"


ReduceOp = str | PremulSum

HALVES = (torch.float16, torch.bfloat16)
# MPI has no correct arithmetic for fractional types narrower than 32 bits; they are accumulated in
# the wider type.
ACCUMULATES_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **{
        getattr(torch, name): torch.float32
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if hasattr(torch, name)
    },
}


@dataclass(frozen=True)
class Reduction:
    """The plan of a reduction of tensors of one dtype.

    Attributes:
        combine: Operation on two contributions: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        wide: The dtype to accumulate in; None for the tensor's own.
        divides: Divide the result by W (AVG).
        factor: Factor of this rank's contribution, or None.
    """

    combine: str
    wide: torch.dtype | None
    divides: bool
    factor: Any = None


def reduction(dtype: torch.dtype, operation: ReduceOp) -> Reduction:
    """Return the plan of a reduction.

    Raises:
        TypeError: The operation has no meaning for the dtype.
        ValueError: Not an operation.
    """
    if isinstance(operation, PremulSum):
        plan = _reduction(dtype, SUM)
        return Reduction(plan.combine, plan.wide, False, _factor_for(dtype, operation.factor))
    if not isinstance(operation, str):
        raise TypeError(
            "a reduction is one of mpidist.comm.SUM, AVG, ... (strings), or PremulSum(factor); "
            f"got {operation!r}"
        )
    return _reduction(dtype, operation)


def _factor_for(dtype: torch.dtype, factor: Any) -> Any:
    """Return the factor as a number of the dtype's kind and range."""
    if dtype == torch.bool:
        raise TypeError("PREMUL_SUM has no meaning for torch.bool; use SUM, which is a logical or")
    is_real = isinstance(factor, numbers.Real)
    if dtype.is_complex:
        return float(factor) if is_real else factor
    if not is_real:
        raise TypeError(f"PREMUL_SUM needs a real factor for {dtype}; got {factor!r}")
    if dtype.is_floating_point:
        return float(factor)
    limits = torch.iinfo(dtype)
    if not (math.isfinite(factor) and factor == int(factor) and limits.min <= factor <= limits.max):
        raise TypeError(
            f"PREMUL_SUM needs a whole number in {limits.min} ... {limits.max} for {dtype}; got "
            f"{factor!r}"
        )
    return int(factor)


def rounds_once(dtype: torch.dtype, plan: Reduction) -> bool:
    """Return whether torch combines two contributions of a half type in fp32, rounded once.

    False for a mean: 60000 + 60000 overflows fp16, half of the sum does not. False with a factor,
    because the product would be rounded.
    """
    return dtype in HALVES and not plan.divides and plan.factor is None


@functools.cache
def _reduction(dtype: torch.dtype, operation: str) -> Reduction:
    if operation not in OPERATIONS:
        raise ValueError(
            f"unknown reduction {operation!r}; choose one of {', '.join(OPERATIONS)}, or "
            "PremulSum(factor)"
        )
    if dtype in _UNSUPPORTED:
        raise TypeError(f"{dtype} has no arithmetic; only collectives that move data take it")
    fractional = dtype.is_floating_point or dtype.is_complex
    if operation in (BAND, BOR, BXOR) and fractional:
        raise TypeError(f"{operation} works on integers and bool; got {dtype}")
    if operation in (MIN, MAX) and dtype.is_complex:
        raise TypeError(f"complex numbers have no order, so {operation} cannot reduce {dtype}")
    if operation == AVG and dtype == torch.bool:
        raise TypeError("avg has no meaning for torch.bool; convert to float first")
    combine = SUM if operation == AVG else operation
    return Reduction(combine, ACCUMULATES_IN.get(dtype), operation == AVG)


_UNSUPPORTED = frozenset(
    getattr(torch, name)
    for name in (
        "qint8",
        "quint8",
        "qint32",
        "quint4x2",
        "quint2x4",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "bits8",
        "bits16",
    )
    if hasattr(torch, name)
)

# Types that torch cannot add and multiply as numbers.
WITHOUT_ARITHMETIC = frozenset((torch.bool, torch.uint16, torch.uint32, torch.uint64))

# In-place forms of MPI's operations, for this library's own algorithms.
COMBINE = {
    SUM: torch.Tensor.add_,
    PRODUCT: torch.Tensor.mul_,
    MIN: lambda a, b: torch.minimum(a, b, out=a),
    MAX: lambda a, b: torch.maximum(a, b, out=a),
}

# Addition and multiplication modulo 2ⁿ are the same for both signs, and torch can compute only the
# signed types.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def scale(tensor: torch.Tensor, plan: Reduction) -> None:
    """Multiply a contribution by its rank's factor, in place, before the sum (PREMUL_SUM)."""
    if plan.factor is None:
        return
    signed = SIGNED.get(tensor.dtype)
    if signed is None:
        tensor.mul_(plan.factor)
    else:
        half = torch.iinfo(signed).max + 1
        tensor.view(signed).mul_((plan.factor + half) % (2 * half) - half)


def divide(tensor: torch.Tensor, plan: Reduction, size: int) -> None:
    """Divide a sum over ``size`` ranks in place, if the plan is a mean."""
    if plan.divides:
        if tensor.dtype.is_complex:
            # torch's complex division rounds more than once.
            torch.view_as_real(tensor).div_(size)
        elif tensor.dtype.is_floating_point:
            tensor.div_(size)
        elif size > torch.iinfo(tensor.dtype).max:
            # Rounded towards zero, as in NCCL, here and below. No type of 64 bits comes here.
            tensor.copy_(torch.div(tensor.to(torch.int64), size, rounding_mode="trunc"))
        else:
            # NumPy can divide the unsigned types that torch cannot.
            values = tensor.numpy()
            values -= np.fmod(values, size)
            values //= size
