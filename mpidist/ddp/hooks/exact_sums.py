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

import math
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

Tensor = torch.Tensor
# Of NumPy on the host, where its calls cost less than torch's; a tensor on a device.
Array: TypeAlias = Any

BLOCK = 4096
# Bits of a piece: at least the 24 of float32's terms below the largest element of a block.
WIDTH = 36
MOST_TERMS = 1 << (53 - WIDTH)
# Top of a block of zeros, below that of the smallest float32.
NO_TOP = -10
MANTISSA_BITS = 52  # of float64
# Elements that are cut together, whose pieces stay in the cache.
_TOGETHER = 8 * BLOCK


@lru_cache(1024)
def bounds_of(numels: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the blocks of tensors begin that lie one behind the other, and where they end.

    No block has elements of two tensors.
    """
    bounds: list[int] = []
    start = 0
    for numel in numels:
        bounds += range(start, start + numel, BLOCK)
        start += numel
    return *bounds, start


def runs_of(
    keys: Sequence[int], bounds: Sequence[int], most: int = sys.maxsize
) -> Iterator[tuple[int, int, int]]:
    """Divide elements into runs of blocks of one key, of at most ``most`` elements each.

    Yields:
        First element, number of elements, key.
    """
    last = len(keys) - 1
    start = bounds[0]
    for place, key in enumerate(keys):
        if place == last or keys[place + 1] != key:
            end = bounds[place + 1]
            for first in range(start, end, most):
                yield first, min(most, end - first), key
            start = end


def units_of(tops: Sequence[int]) -> Sequence[int]:
    """Return tops without ``NO_TOP``, as zeros are zeros in any unit."""
    if NO_TOP not in tops:
        return tops
    highest = max(tops)
    unit = highest if highest > NO_TOP else 0
    return [unit if top == NO_TOP else top for top in tops]


def tops_of(flat: Tensor, bounds: Sequence[int]) -> tuple[list[int], bool]:
    """Return the top of each block: the least i for which its elements are below 2^(WIDTH·(i+1)-1).

    Infinities and NaN do not count.

    Args:
        flat: Shape (N,), of float32 or narrower.
        bounds: ``bounds_of`` its tensors.

    Returns:
        The tops, and whether all elements are finite.
    """
    largest = largest_of(flat, bounds)
    is_finite = math.isfinite(sum(largest))
    if not is_finite:
        largest = largest_of(torch.where(flat.isfinite(), flat, 0), bounds)
    # 2^(e - 1) <= largest < 2^e, and e <= WIDTH·(top + 1) - 1.
    return [math.frexp(size)[1] // WIDTH if size else NO_TOP for size in largest], is_finite


def largest_of(flat: Tensor, bounds: Sequence[int]) -> list[float]:
    """Return the largest size in each block of elements; NaN if one is in it."""
    values, starts = _array(flat), bounds[:-1]
    if isinstance(values, np.ndarray):
        # Both read the elements once and write none; abs() would write them all.
        highest, lowest = np.maximum.reduceat(values, starts), np.minimum.reduceat(values, starts)
        return np.maximum(highest, -lowest).tolist()
    sizes = [after - before for before, after in pairwise(bounds)]
    blocks = [flat.narrow(0, start, n).view(-1, size) for start, n, size in runs_of(sizes, bounds)]
    largest = [torch.maximum(each.amax(1), each.amin(1).neg()) for each in blocks]
    return torch.cat([flat[:0], *largest]).tolist()


def cut(elements: Array, top: int, is_finite: bool, high: Array, low: Array) -> None:
    """Cut elements at their top into pieces; an infinity or NaN is all in ``high``.

    Args:
        elements: Of float32 or narrower.
        top: At least that of ``tops_of`` their blocks.
        is_finite: All elements are finite.
        high: Result, same shape, float64: multiples of 2^(WIDTH·top).
        low: Result, likewise: multiples of 2^(WIDTH·(top - 1)).
    """
    # (x + c) - c rounds x to multiples of c's last place.
    upper = 1.5 * 2.0 ** (MANTISSA_BITS + WIDTH * top)
    lower = upper * 2.0**-WIDTH
    of = _functions(high)
    low[...] = elements
    of.subtract(of.add(low, upper, out=high), upper, out=high)
    of.subtract(low, high, out=low)
    if not is_finite:
        low[low != low] = 0.0
    of.subtract(of.add(low, lower, out=low), lower, out=low)


def cut_in_runs(
    flat: Tensor, tops: Sequence[int], bounds: Sequence[int], is_finite: bool
) -> Iterator[tuple[slice, Array, Array]]:
    """Cut a term's blocks at their tops, a few at a time.

    Yields:
        A range of elements, and their high and low pieces, in memory that the next ones take.
    """
    most = min(flat.numel(), _TOGETHER)
    memory = _array(torch.empty(2, most, dtype=torch.float64, device=flat.device))
    elements = _array(flat)
    for start, numel, top in runs_of(units_of(tops), bounds, most):
        part = slice(start, start + numel)
        high, low = memory[:, :numel]
        cut(elements[part], top, is_finite, high, low)
        yield part, high, low


def _array(tensor: Tensor) -> Array:
    if not tensor.is_cpu:
        return tensor
    return (tensor if tensor.dtype is torch.float64 else tensor.float()).numpy()


def _functions(array: Array) -> Any:
    return np if isinstance(array, np.ndarray) else torch


class ExactSum:
    """Sum of the terms so far of a tensor, or of several that lie one behind the other.

    Args:
        memory: Of ``high`` and ``low``, shape (2, N), float64.

    Attributes:
        bounds: ``bounds_of`` the tensors.
        tops: Of each block.
        high: Shape (N,).
        low: Same.
        is_finite: No term had an infinity or a NaN.
    """

    def __init__(
        self, memory: Tensor, bounds: Sequence[int], tops: Sequence[int], is_finite: bool
    ) -> None:
        self.memory, (self.high, self.low) = memory, memory
        self.bounds, self.tops, self.is_finite = bounds, tops, is_finite

    @classmethod
    @np.errstate(invalid="ignore")
    def of(cls, first: Tensor, memory: Tensor | None = None) -> ExactSum:
        """Return a sum of one term, shape (N,), in ``memory`` that is not used any more."""
        numel, bounds = first.numel(), bounds_of((first.numel(),))
        if memory is None or memory.device != first.device:
            memory = torch.empty(2, numel, dtype=torch.float64, device=first.device)
        held = cls(memory, bounds, *tops_of(first, bounds))
        elements, pieces = _array(first), _array(memory)
        for start, n, top in runs_of(units_of(held.tops), bounds, _TOGETHER):
            part = slice(start, start + n)
            cut(elements[part], top, held.is_finite, *pieces[:, part])
        return held

    @np.errstate(invalid="ignore")
    def add(self, term: Tensor) -> None:
        """Add a term of the same number of elements."""
        tops, is_finite = tops_of(term, self.bounds)
        self.is_finite &= is_finite
        self.raise_to([*map(max, self.tops, tops)])
        pieces = _array(self.memory)
        for part, *cut_pieces in cut_in_runs(term, self.tops, self.bounds, is_finite):
            for held, piece in zip(pieces[:, part], cut_pieces, strict=True):
                held += piece

    def raise_to(self, tops: Sequence[int]) -> None:
        """Move to higher tops: by one, the high piece is the low one; by more, nothing is left."""
        before, self.tops = self.tops, tops
        if before == tops:
            return
        steps = [0 if old == NO_TOP else new - old for old, new in zip(before, tops, strict=True)]
        for start, numel, step in runs_of(steps, self.bounds):
            if step:
                high, low = self.memory.narrow(1, start, numel)
                # Infinities and NaN stay.
                is_finite = high.isfinite()
                low.copy_(torch.where(is_finite, high, 0)) if step == 1 else low.zero_()
                high.masked_fill_(is_finite, 0)


def joined(sums: Sequence[ExactSum | None], parts: Sequence[Tensor], memory: Tensor) -> ExactSum:
    """Return the sums of several tensors as one.

    Args:
        sums: None for a sum of no terms.
        parts: Views of ``memory``, shape (2, n) for n elements of each tensor.
        memory: Shape (2, N), of the result.
    """
    bounds = bounds_of(tuple([part.shape[1] for part in parts]))
    tops: list[int] = []
    for held, part in zip(sums, parts, strict=True):
        if held is None:
            part.zero_()
            tops += [NO_TOP] * -(-part.shape[1] // BLOCK)
        else:
            if held.memory is not part:
                part.copy_(held.memory)
            tops += held.tops
    is_finite = all(held is None or held.is_finite for held in sums)
    return ExactSum(memory, bounds, tops, is_finite)


@np.errstate(invalid="ignore")
def write_totals(
    term: Tensor,
    before: ExactSum | None,
    tops: Sequence[int],
    bounds: Sequence[int],
    is_finite: bool,
    target: Tensor,
    lost: Tensor,
    is_rest: bool = False,
) -> None:
    """Write the sum of a term and those before it, rounded to one float64 an element.

    Args:
        term: Shape (N,), of float32 or narrower.
        before: Sum of the earlier terms, which moves to ``tops``; None without one.
        tops: Of each block, over the term and those before, perhaps those of other ranks.
        bounds: Of the blocks.
        is_finite: All are finite.
        target: Result, float64, shape (N,).
        lost: Shape (1,), float64: grows if a total differs from the sum, or is not finite.
        is_rest: Write what the totals lack in place of them; sums of both are exact.
    """
    if before is not None:
        before.raise_to(tops)
    totals, is_lost = _array(target), _array(lost)
    pieces = None if before is None else _array(before.memory)
    for part, high, low in cut_in_runs(term, tops, bounds, is_finite):
        of, total = _functions(high), totals[part]
        if pieces is None:
            # Of one term nothing is lost.
            of.add(high, low, out=total)
            if is_rest:
                total[...] = 0.0
            continue
        high += pieces[0, part]
        low += pieces[1, part]
        of.add(high, low, out=total)
        # Exact: both are multiples of the unit below 2^53 of which ``low`` is.
        of.subtract(total, high, out=high)
        is_lost += (high != low).any()
        if is_rest:
            of.subtract(low, high, out=total)
            total[total != total] = 0.0
