"""MIN and MAX of floating-point numbers as integers of the same order: NaN wins, and -0 < +0.

MPI leaves the maximum of NaN and a number open; libraries return either, and different ranks may
hold different results. Integers have a total order. Flipping all bits but the sign of negative
floats gives integers in the order of the floats; the same step converts back.
"""

from __future__ import annotations

import torch

from mpidist.comm.algorithms.reduce_op import MAX, MIN, Reduction

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def applies(dtype: torch.dtype, plan: Reduction) -> bool:
    """Return whether a reduction is computed on integers."""
    return plan.combine in (MIN, MAX) and dtype.is_floating_point


def encode(tensor: torch.Tensor, plan: Reduction) -> torch.Tensor:
    """Return integers in the order of the tensor's numbers, of its shape; NaN wins."""
    numbers = tensor.float() if tensor.element_size() == 1 else tensor
    ints = _flip(numbers.view(INTEGERS[numbers.element_size()]).clone())
    limits = torch.iinfo(ints.dtype)
    return ints.masked_fill_(numbers.isnan(), limits.max if plan.combine == MAX else limits.min)


def decode(ints: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the numbers of encoded integers into ``tensor``."""
    numbers = torch.float32 if tensor.element_size() == 1 else tensor.dtype
    tensor.copy_(_flip(ints).view(numbers))


def _flip(ints: torch.Tensor) -> torch.Tensor:
    limits = torch.iinfo(ints.dtype)
    return ints.bitwise_xor_((ints >> (limits.bits - 1)).bitwise_and_(limits.max))
