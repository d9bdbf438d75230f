"""Exact means of what the ranks send: one term of each, or what each has added.

A term that was added to no other before need not be cut where it arises: its float32 values say
all, in a quarter of the bytes of its pieces. A sum of several is sent in one float64 an element,
the total of its pieces, and in a second one where the total is rounded. The rank that rounds a
share of the means gets it of all W ranks and does here what ``exact_sums`` does with pieces, in
fewer passes: a term is cut at a block's lower unit u by rounding x / u to a whole number, of at
most 71 bits; where a sum of them might need more than 53, each is divided into a high and a low
part whose sums are exact. The means have the bits of those of ``ExactSum``.

Letters: W ranks; N elements of the share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.ddp.hooks.exact_sums import WIDTH, runs_of, units_of

Tensor = torch.Tensor

# Elements of all terms that are added together, whose passes stay in the cache.
_TOGETHER = 1 << 16
# Tops whose unit, and that times W, are float32; whole numbers of those units are, too.
_LOWEST, _MOST_TERMS = -2, 32
# (x + c) - c rounds a whole number to multiples of the last place of c: in float32, whose numbers
# are below 2^71, 2^49, which leaves lower parts of 48 bits and their sign. In float64 they are
# totals of T terms below T·2^71, with ``MOST_TERMS`` of all ranks: multiples of at least 2^35, and
# lower parts of at most 2^36.
_SHIFTS = {torch.float32: 1.5 * 2.0**72, torch.float64: 1.5 * 2.0**88}


def write_means(
    rows: Tensor,
    tops: Sequence[int],
    bounds: Sequence[int],
    means: Tensor,
    terms: int,
    is_finite: bool = True,
    place: int = 0,
) -> None:
    """Write the means of terms, rounded to float32 and then to their dtype.

    Args:
        rows: A share of the vector, shape (R, N): one term of each rank, of float32 or narrower; or
            totals of float64, of which each rank may have several.
        tops: Of the blocks of the whole vector, over all terms.
        bounds: Of the blocks.
        means: Result, shape (N,); may be one of the rows.
        terms: How many terms are in all rows.
        is_finite: All are finite; else means are infinite or NaN where a plain sum is.
        place: The share's number, whose elements begin at ``place``·N; those behind the last block
            get any means.
    """
    count, numel = rows.shape
    first = place * numel
    ends = [min(max(bound - first, 0), numel) for bound in bounds]
    ends[-1] = numel
    most = min(max(_TOGETHER // count, 1), numel)
    memory: Tensor | None = None
    for start, n, top in runs_of(units_of(tops), ends, most):
        row, mean = rows.narrow(1, start, n), means.narrow(0, start, n)
        is_narrow = top >= _LOWEST and count <= _MOST_TERMS and rows.dtype is not torch.float64
        dtype = torch.float32 if is_narrow else torch.float64
        if memory is None or memory.dtype is not dtype:
            memory = torch.empty((count, most), dtype=dtype, device=rows.device)
        numbers = memory if n == most else memory.narrow(1, 0, n)
        if rows.dtype is torch.float64:
            # Multiples of each block's unit already.
            total = _sum_of(row, _SHIFTS[dtype] / _scale(top), is_finite, numbers)
            divisor = float(terms)
        else:
            # In units of each block; ties go to even numbers, as in ``exact_sums.cut``.
            torch.mul(row, _number(_scale(top), memory), out=numbers).round_()
            total = _sum_of(numbers, _SHIFTS[dtype], is_finite, numbers)
            divisor = _scale(top) * terms
        mean.copy_(total.div_(_number(divisor, memory)).float())


def _scale(top: int) -> float:
    return 2.0 ** (WIDTH * (1 - top))


def _number(value: float, like: Tensor) -> Tensor:
    # A device multiplies with the reciprocal in place of a division by a number of the host.
    return torch.full((1,), value, dtype=like.dtype, device=like.device)


def _sum_of(numbers: Tensor, shift: float, is_finite: bool, memory: Tensor) -> Tensor:
    """Return the sums of whole numbers, as if rounded to float64 once and then to their dtype.

    Args:
        numbers: Shape (R, n), in any unit.
        shift: Of the numbers' dtype, in that unit.
        is_finite: All are finite.
        memory: Shape and dtype of the numbers, which it may be; overwritten.

    Returns:
        Shape (n,).
    """
    if len(numbers) <= 2:
        # The sum of two float32 is the same with and without float64 between, and so is a half of
        # it. Zeros have no sign, as if pieces had been added.
        other = numbers[1] if len(numbers) == 2 else 0.0
        return torch.add(numbers[0], other, out=memory[0]).add_(0.0)
    high = torch.add(numbers, shift).sub_(shift)
    low = torch.sub(numbers, high, out=memory)
    if not is_finite:
        low.nan_to_num_(nan=0.0)
    return low.double().sum(0).add_(high.double().sum(0))
