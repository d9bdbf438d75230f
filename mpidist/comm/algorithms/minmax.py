"""MIN and MAX of floating-point numbers, as integers of the same order: NaN wins on every rank, and -0 is less than +0.

MPI leaves the maximum of NaN and a number open; libraries return either, and not the same on all
ranks. Integers have one order. A sign-magnitude float becomes an integer of its order by flipping
the other bits of negative numbers; the same step leads back.
"""

from __future__ import annotations

import torch

from mpidist.comm.algorithms.reduce_op import MAX, MIN, Reduction

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def applies(dtype: torch.dtype, plan: Reduction) -> bool:
    """Say whether a reduction is to be carried out on integers."""
    return plan.combine in (MIN, MAX) and dtype.is_floating_point


def encode(tensor: torch.Tensor, plan: Reduction) -> torch.Tensor:
    """Return integers of the tensor's shape whose MIN or MAX is that of its numbers; NaN is the winner."""
    numbers = tensor.float() if tensor.element_size() == 1 else tensor
    ints = _flip(numbers.view(INTEGERS[numbers.element_size()]).clone())
    limits = torch.iinfo(ints.dtype)
    return ints.masked_fill_(numbers.isnan(), limits.max if plan.combine == MAX else limits.min)


def decode(ints: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the numbers that the integers stand for into ``tensor``."""
    numbers = torch.float32 if tensor.element_size() == 1 else tensor.dtype
    tensor.copy_(_flip(ints).view(numbers))


def _flip(ints: torch.Tensor) -> torch.Tensor:
    limits = torch.iinfo(ints.dtype)
    return ints.bitwise_xor_((ints >> (limits.bits - 1)).bitwise_and_(limits.max))
