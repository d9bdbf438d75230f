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
from itertools import accumulate, pairwise

import torch

from mpidist.ddp.hooks.exact_sums import NO_TOP, WIDTH

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


def scales_of(tops: Sequence[int], lengths: Sequence[int], rows: Tensor, place: int = 0) -> Tensor:
    """Return 1 / u for each element of a share.

    Args:
        tops: Of the blocks of the whole vector, over all terms; all finite.
        lengths: Their numbers of elements, in order.
        rows: The share of all ranks, shape (R, N), as in ``write_means``.
        place: The share's number, whose elements begin at ``place``·N; those behind the last block
            may have any scale.

    Returns:
        Shape (N,), or (1,) for all; in float32 where that is exact and the rows are no wider, else
        in float64.
    """
    # Zeros are zeros in any unit.
    units = {*tops} - {NO_TOP} or {0}
    lowest, highest = min(units), max(units)
    is_narrow = rows.dtype is not torch.float64 and lowest >= _LOWEST and len(rows) <= _MOST_TERMS
    dtype, numel = torch.float32 if is_narrow else torch.float64, rows.shape[1]
    if lowest == highest:
        return torch.full((1,), _scale(highest), dtype=dtype, device=rows.device)
    # How many elements of each block lie in the share; the last block goes on behind its end.
    start, end = place * numel, (place + 1) * numel
    bounds = [0, *accumulate(lengths)]
    bounds[-1] = max(bounds[-1], end)
    bounds = [min(max(bound, start), end) for bound in bounds]
    counts = torch.tensor([after - before for before, after in pairwise(bounds)])
    scales = [_scale(highest if top == NO_TOP else top) for top in tops]
    of_blocks = torch.tensor(scales, dtype=dtype, device=rows.device)
    return torch.repeat_interleave(of_blocks, counts.to(rows.device), output_size=numel)


def _scale(top: int) -> float:
    return 2.0 ** (WIDTH * (1 - top))


def write_means(
    rows: Tensor, scales: Tensor, means: Tensor, terms: int, is_finite: bool = True
) -> None:
    """Write the means of terms, rounded to float32 and then to their dtype.

    Args:
        rows: Shape (R, N): one term of each rank, of float32 or narrower; or totals of float64,
            of which each rank may have several.
        scales: Shape (N,), of ``scales_of``.
        means: Result, shape (N,); may be one of the rows.
        terms: How many terms are in all rows.
        is_finite: All are finite; else means are infinite or NaN where a plain sum is.
    """
    count, numel = rows.shape
    step = min(max(_TOGETHER // count, 1), numel)
    are_totals = rows.dtype is torch.float64
    memory = torch.empty((count, step), dtype=scales.dtype, device=rows.device)
    for start in range(0, numel, step):
        part = slice(start, start + step)
        scale = scales if len(scales) == 1 else scales[part]
        row, mean = rows[:, part], means[part]
        numbers = memory[:, : mean.numel()]
        if are_totals:
            # Multiples of each block's unit already.
            total = _sum_of(row, _SHIFTS[row.dtype] / scale, is_finite, numbers).div_(terms)
        else:
            # In units of each block; ties go to even numbers, as in ``exact_sums.cut``.
            torch.mul(row, scale, out=numbers).round_()
            total = _sum_of(numbers, _SHIFTS[scale.dtype], is_finite, numbers)
            total.div_(scale * terms)
        mean.copy_(total if mean.dtype is torch.float32 else total.float())


def _sum_of(numbers: Tensor, shift: float | Tensor, is_finite: bool, memory: Tensor) -> Tensor:
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
    sums = torch.zeros(2, numbers.shape[1], dtype=torch.float64, device=numbers.device)
    # Row by row, in memory of one row.
    for row in numbers:
        high = torch.add(row, shift).sub_(shift)
        sums[0].add_(high)
        low = torch.sub(row, high, out=high)
        sums[1].add_(low if is_finite else low.nan_to_num_(nan=0.0))
    return sums[1].add_(sums[0])
