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

import torch

Tensor = torch.Tensor

BLOCK = 4096
# Bits of a piece: at least the 24 of float32's terms below the largest element of a block.
WIDTH = 36
MOST_TERMS = 1 << (53 - WIDTH)
FOLDS = 2
# Top of a block of zeros, below that of the smallest float32.
NO_TOP = -10
# Blocks that are cut together, whose pieces stay in the cache.
_TOGETHER = 32


def blocks_of(flat: Tensor) -> Tensor:
    """Return elements in blocks, zeros behind the last; fewer than ``BLOCK`` are one block.

    Returns:
        Shape (blocks, BLOCK) or (1, N); a view where no zeros are needed.
    """
    numel = flat.numel()
    if 0 < numel <= BLOCK:
        return flat.view(1, numel)
    if numel % BLOCK:
        flat = torch.nn.functional.pad(flat, (0, -numel % BLOCK))
    return flat.view(flat.numel() // BLOCK, BLOCK)


def lengths_of(numel: int) -> list[int]:
    """Return the number of elements of each of the blocks of ``numel`` elements."""
    return [BLOCK] * (numel // BLOCK) + [numel % BLOCK] * (numel % BLOCK > 0)


def largest_of(flat: Tensor) -> Tensor:
    """Return the largest size in each block of elements; NaN if one is in it."""
    numel = flat.numel()
    whole = numel - numel % BLOCK
    if 0 < whole < numel:
        # The last elements are a block without a copy of all.
        return torch.cat([_largest(blocks_of(flat[:whole])), _largest(flat[whole:].view(1, -1))])
    return _largest(blocks_of(flat))


def tops_from(largest: Tensor) -> Tensor:
    """Return the tops, int32, of blocks with these largest sizes, all finite."""
    exponents = torch.frexp(largest.double()).exponent
    tops = torch.div(exponents + WIDTH, WIDTH, rounding_mode="floor") - 1
    # 2^(e - 1) <= largest < 2^e, and e <= WIDTH·(top + 1) - 1.
    return torch.where(largest > 0, tops, NO_TOP).int()


def tops_of(blocks: Tensor) -> tuple[Tensor, bool]:
    """Return the top of each block: the least i for which its elements are below 2^(WIDTH·(i+1)-1).

    Infinities and NaN do not count.

    Args:
        blocks: Shape (blocks, n), of float32 or narrower.

    Returns:
        int32, and whether all elements are finite.
    """
    largest = _largest(blocks)
    is_finite = bool(largest.isfinite().all())
    if not is_finite:
        largest = _largest(torch.where(blocks.isfinite(), blocks, 0))
    return tops_from(largest), is_finite


def cut(blocks: Tensor, tops: Tensor, is_finite: bool, high: Tensor, low: Tensor) -> None:
    """Cut each block at its top into pieces; an infinity or NaN is all in ``high``.

    Args:
        blocks: Shape (blocks, n), of float32 or narrower.
        tops: Of each block, at least that of ``tops_of``.
        is_finite: All elements are finite.
        high: Result, same shape, float64: multiples of 2^(WIDTH·top).
        low: Result, likewise: multiples of 2^(WIDTH·(top - 1)).
    """
    # (x + c) - c rounds x to multiples of c's last place.
    ones = torch.full((len(tops), 1), 1.5 * 2.0**52, dtype=torch.float64, device=blocks.device)
    shifts = torch.ldexp(ones, WIDTH * tops[:, None])
    smaller = shifts * 2.0**-WIDTH
    for start in range(0, len(blocks), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        term, piece, rest = blocks[part], high[part], low[part]
        torch.add(term, shifts[part], out=piece).sub_(shifts[part])
        torch.sub(term, piece, out=rest)
        if not is_finite:
            rest.nan_to_num_(nan=0.0)
        rest.add_(smaller[part]).sub_(smaller[part])


class ExactSum:
    """Sum of the terms of one tensor so far.

    Attributes:
        tops: Of each block, int32.
        high: Shape of the blocks, float64.
        low: Same.
    """

    def __init__(self, first: Tensor) -> None:
        blocks = blocks_of(first)
        self.tops, is_finite = tops_of(blocks)
        self.high, self.low = _pieces_of(blocks, self.tops, is_finite)

    def add(self, term: Tensor) -> None:
        """Add a term of the same number of elements."""
        blocks = blocks_of(term)
        tops, is_finite = tops_of(blocks)
        self.raise_to(torch.maximum(self.tops, tops))
        high, low = _pieces_of(blocks, self.tops, is_finite)
        self.high += high
        self.low += low

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


def _largest(blocks: Tensor) -> Tensor:
    # Both read the elements once and write none; abs() would write them all.
    return torch.maximum(blocks.amax(1), blocks.amin(1).neg())


def _pieces_of(blocks: Tensor, tops: Tensor, is_finite: bool) -> tuple[Tensor, Tensor]:
    high = torch.empty_like(blocks, dtype=torch.float64)
    low = torch.empty_like(high)
    cut(blocks, tops, is_finite, high, low)
    return high, low
