"""Sums of floating-point tensors whose bits depend on no order, grouping or number of terms.

Each block of ``BLOCK`` elements has a grid of absolute units 2^(WIDTH·i). A term is cut at the unit
of the block's largest element, its top, and the remainder at the next unit below; what is smaller
than half of that is dropped. The pieces of all terms are multiples of one unit, so float64 adds
them without rounding, up to ``MOST_TERMS``. If a larger element comes, the top moves up, and the
lower piece of all earlier terms is dropped as a whole: the sums are those of the terms cut at the
new top from the start. At least WIDTH bits below a block's largest element are kept.

Source: J. Demmel and H. D. Nguyen, "Parallel Reproducible Summation", IEEE Transactions on
Computers 64 (2015), with two folds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

Tensor = torch.Tensor

BLOCK = 4096
# Bits of a piece: at least the 24 of float32's terms below the largest element of a block.
WIDTH = 36
MOST_TERMS = 1 << (53 - WIDTH)
# Top of a block of zeros, below that of the smallest float32.
NO_TOP = -10
# Of a block with an infinity or a NaN, above that of the largest float32.
NOT_FINITE = 28
# Of float64.
BIAS, MANTISSA_BITS = 1023, 52
# Blocks that are cut together, whose pieces stay in the cache.
_TOGETHER = 8


def lengths_of(numel: int) -> list[int]:
    """Return the number of elements of each of the blocks of ``numel`` elements."""
    return [BLOCK] * (numel // BLOCK) + [numel % BLOCK] * (numel % BLOCK > 0)


def largest_of(flat: Tensor) -> Tensor:
    """Return the largest size in each block of elements; NaN if one is in it."""
    numel = flat.numel()
    whole = numel - numel % BLOCK
    if not whole:
        return _largest(flat.view(1, numel)) if numel else flat
    largest = _largest(flat[:whole].view(-1, BLOCK))
    # The last elements are a block without a copy of all.
    return torch.cat([largest, _largest(flat[whole:].view(1, -1))]) if whole < numel else largest


def tops_from(largest: Tensor) -> Tensor:
    """Return the tops, int32, of blocks with these largest sizes, or ``NOT_FINITE``."""
    # 2^(e - 1) <= largest < 2^e, and e <= WIDTH·(top + 1) - 1. In float64 no float32 is subnormal.
    exponents = largest.double().view(torch.int64) >> MANTISSA_BITS
    exponents.bitwise_and_(0x7FF).sub_(BIAS - 1)
    return exponents.floor_divide_(WIDTH).clamp_(min=NO_TOP).int()


def tops_of(flat: Tensor) -> tuple[Tensor, bool]:
    """Return the top of each block: the least i for which its elements are below 2^(WIDTH·(i+1)-1).

    Infinities and NaN do not count.

    Args:
        flat: Shape (N,), of float32 or narrower.

    Returns:
        int32, and whether all elements are finite.
    """
    tops = tops_from(largest_of(flat))
    if not bool((tops == NOT_FINITE).any()):
        return tops, True
    return tops_from(largest_of(torch.where(flat.isfinite(), flat, 0))), False


def shifts_of(tops: Tensor) -> Tensor:
    """Return 1.5·2^52 times the upper and the lower unit of each block, shape (2, blocks, 1)."""
    bits = (BIAS + MANTISSA_BITS + WIDTH * tops.long()) << MANTISSA_BITS
    upper = bits.view(torch.float64).mul(1.5).view(-1, 1)
    return torch.stack([upper, upper * 2.0**-WIDTH])


def cut(blocks: Tensor, shifts: Tensor, is_finite: bool, high: Tensor, low: Tensor) -> None:
    """Cut each block at its top into pieces; an infinity or NaN is all in ``high``.

    Args:
        blocks: Shape (blocks, n), of float32 or narrower.
        shifts: ``shifts_of`` the blocks' tops, each at least that of ``tops_of``.
        is_finite: All elements are finite.
        high: Result, same shape, float64: multiples of 2^(WIDTH·top).
        low: Result, likewise: multiples of 2^(WIDTH·(top - 1)).
    """
    upper, lower = shifts
    # (x + c) - c rounds x to multiples of c's last place.
    low.copy_(blocks)
    torch.add(low, upper, out=high).sub_(upper)
    low.sub_(high)
    if not is_finite:
        low.nan_to_num_(nan=0.0)
    low.add_(lower).sub_(lower)


def cut_in_parts(
    flat: Tensor, tops: Tensor, is_finite: bool, target: Tensor | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Cut a term's blocks at their tops, a few at a time.

    Args:
        flat: Shape (N,), of float32 or narrower.
        tops: Of each block, at least that of ``tops_of``.
        is_finite: All elements are finite.
        target: Shape (2, N), float64: memory for the pieces.

    Yields:
        A range of elements, and their high and low pieces, flat; without a target in memory that
        the next part's take.
    """
    numel, shifts, step = flat.numel(), shifts_of(tops), _TOGETHER * BLOCK
    memory = target
    if memory is None:
        memory = torch.empty(2, min(numel, step), dtype=torch.float64, device=flat.device)
    whole = numel - numel % BLOCK
    # The last elements are a block of their own length.
    starts = [*range(0, whole, step), *([whole] if whole < numel else [])]
    for start, end in pairwise([*starts, numel]):
        first = start // BLOCK
        count = -(-(end - start) // BLOCK)
        pieces = memory[:, : end - start] if target is None else target[:, start:end]
        blocks = flat[start:end].view(count, -1)
        high, low = pieces.view(2, count, -1)
        cut(blocks, shifts[:, first : first + count], is_finite, high, low)
        yield slice(start, end), pieces[0], pieces[1]


class ExactSum:
    """Sum of the terms of one tensor so far.

    Args:
        first: The first term, shape (N,).
        memory: ``memory`` of a sum of as many elements that is not used any more.

    Attributes:
        tops: Of each block, int32.
        high: Shape (blocks, BLOCK), or (1, N) if N is smaller; float64, zeros behind the elements.
        low: Same.
        is_finite: No term had an infinity or a NaN.
        memory: Of ``high`` and ``low``.
    """

    def __init__(self, first: Tensor, memory: Tensor | None = None) -> None:
        self.tops, self.is_finite = tops_of(first)
        numel = first.numel()
        if memory is None or memory.device != first.device:
            shape = 2, len(self.tops), min(numel, BLOCK)
            memory = torch.empty(shape, dtype=torch.float64, device=first.device)
        self.memory, (self.high, self.low) = memory, memory
        flat = memory.flatten(1)
        flat[:, numel:].zero_()
        for _ in cut_in_parts(first, self.tops, self.is_finite, flat):
            pass

    def add(self, term: Tensor) -> None:
        """Add a term of the same number of elements."""
        tops, is_finite = tops_of(term)
        self.is_finite &= is_finite
        self.raise_to(torch.maximum(self.tops, tops))
        flat_high, flat_low = self.high.view(-1), self.low.view(-1)
        for part, high, low in cut_in_parts(term, self.tops, is_finite):
            flat_high[part].add_(high)
            flat_low[part].add_(low)

    def raise_to(self, tops: Tensor) -> None:
        """Move to higher tops: by one, the high piece is the low one; by more, nothing is left."""
        steps = tops - self.tops
        if bool((steps > 0).any()):
            moved = torch.nonzero(steps > 0)[:, 0]
            by_one = (steps[moved] == 1)[:, None]
            kept = torch.where(by_one, self.high[moved], 0)
            # Infinities and NaN stay.
            lost = torch.where(self.high[moved].isfinite(), 0, self.high[moved])
            self.low[moved] = torch.where(kept.isfinite(), kept, 0)
            self.high[moved] = lost
            self.tops = tops.clone()


def write_totals(
    term: Tensor,
    before: ExactSum | None,
    tops: Tensor,
    is_finite: bool,
    target: Tensor,
    lost: Tensor,
    is_rest: bool = False,
) -> None:
    """Write the sum of a term and those before it, rounded to one float64 an element.

    Args:
        term: Shape (N,), of float32 or narrower.
        before: Sum of the earlier terms, which moves to ``tops``; None without one.
        tops: Of each block, over the term, those before and those of other ranks.
        is_finite: All are finite.
        target: Result, float64, shape (N,).
        lost: Shape (1,), float64: grows by a number > 0 if a total differs from the sum, or by NaN.
        is_rest: Write what the totals lack in place of them; sums of both are exact.
    """
    if before is None:
        # Of one term nothing is lost.
        for part, high, low in cut_in_parts(term, tops, is_finite):
            torch.add(high, low, out=target[part])
        if is_rest:
            target.zero_()
        return
    before.raise_to(tops)
    high_before, low_before = before.high.view(-1), before.low.view(-1)
    for part, high, low in cut_in_parts(term, tops, is_finite):
        high.add_(high_before[part])
        low.add_(low_before[part])
        total = torch.add(high, low, out=target[part])
        # Exact: ``high`` and ``low`` are multiples of the unit below 2^53 of which ``low`` is.
        rest = low.add_(high.sub_(total))
        lost.add_(torch.dot(rest, rest))
        if is_rest:
            total.copy_(rest if is_finite else rest.nan_to_num_(nan=0.0))


def _largest(blocks: Tensor) -> Tensor:
    # Both read the elements once and write none; abs() would write them all.
    return torch.maximum(blocks.amax(1), blocks.amin(1).neg())
