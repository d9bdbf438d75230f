"""Exact means of one term of each rank, from the terms themselves.

A term that was added to no other before need not be cut where it arises: its float32 values say
all, in a quarter of the bytes of its pieces. The rank that rounds a share of the means gets it of
all W terms and does here what ``exact_sums`` does with pieces, in fewer passes: a term is cut at a
block's lower unit u by rounding x / u to a whole number, of at most 71 bits; where a sum of W of
them might need more than 53, each is divided into a high and a low part whose sums are exact. The
means have the bits of those of ``ExactSum``.

Letters: W terms; N elements of the share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.ddp.hooks.exact_sums import NO_TOP, WIDTH

Tensor = torch.Tensor

# Elements of all terms that are added together, whose passes stay in the cache.
_TOGETHER = 1 << 16
# Tops whose unit, and that times W, are float32; whole numbers of those units are, too.
_LOWEST, _MOST_TERMS = -2, 32
# Of float64.
_BIAS, _MANTISSA_BITS = 1023, 52
# (x + c) - c rounds a whole number below 2^71 to multiples of the last place of c: in float32 2^49,
# which leaves lower parts of 48 bits and their sign, in float64 2^36.
_SHIFTS = {torch.float32: 1.5 * 2.0**72, torch.float64: 1.5 * 2.0**88}


def scales_of(
    tops: Tensor, lengths: Sequence[int], terms: int, numel: int, place: int = 0
) -> Tensor:
    """Return 1 / u for each element of a share.

    Args:
        tops: Of the blocks of the whole vector, int32, over all terms.
        lengths: Their numbers of elements, in order.
        terms: W.
        numel: N; elements behind the last block may have any scale.
        place: The share's number, whose elements begin at ``place``·N.

    Returns:
        Shape (N,); in float32 where that is exact, else in float64.
    """
    highest = int(tops.max())
    # Zeros are zeros in any unit.
    tops = torch.where(tops > NO_TOP, tops, highest)
    lowest = int(tops.min())
    is_narrow = lowest >= _LOWEST and terms <= _MOST_TERMS
    # The bits of 2^(-WIDTH·(top - 1)): ldexp takes its power in float32, where it may be infinite.
    bits = (_BIAS + WIDTH * (1 - tops.long())) << _MANTISSA_BITS
    scales = bits.view(torch.float64).to(torch.float32 if is_narrow else torch.float64)
    if lowest == highest:
        return scales[:1].expand(numel)
    counts = torch.tensor(lengths, device=tops.device)
    ends = counts.cumsum(0)
    start, end = place * numel, (place + 1) * numel
    # How many elements of each block lie in the share; the last block goes on behind its end.
    starts, ends[-1] = (ends - counts).clamp(start, end), max(int(ends[-1]), end)
    return torch.repeat_interleave(scales, ends.clamp(start, end) - starts)


def write_means(terms: Tensor, scales: Tensor, means: Tensor) -> None:
    """Write the means of terms that are all finite, rounded to float32 and then to their dtype.

    Args:
        terms: Shape (W, N), of float32 or narrower.
        scales: Shape (N,), of ``scales_of``.
        means: Result, shape (N,); may be one of the terms.
    """
    step = max(_TOGETHER // len(terms), 1)
    for start in range(0, means.numel(), step):
        part = slice(start, start + step)
        scale = scales[part]
        # In units of each block; ties go to even numbers, as in ``exact_sums.cut``.
        numbers = torch.mul(terms[:, part], scale).round_()
        total = _sum_of(numbers)
        means[part].copy_(total.div_(scale * len(terms)).float())


def _sum_of(numbers: Tensor) -> Tensor:
    """Return the sums of whole numbers, as if rounded to float64 once and then to their dtype."""
    if len(numbers) <= 2 and numbers.dtype is torch.float32:
        # The sum of two float32 is the same with and without float64 between, and so is a half of
        # it. Zeros have no sign, as if pieces had been added.
        return numbers.sum(0).add_(0.0)
    shift = _SHIFTS[numbers.dtype]
    high = torch.add(numbers, shift).sub_(shift)
    low = numbers.sub_(high)
    return low.sum(0, dtype=torch.float64).add_(high.sum(0, dtype=torch.float64))
