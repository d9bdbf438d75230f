"""Exact sums: one result for any order and grouping, close to the exact one."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from mpidist.ddp.hooks import exact_sums
from mpidist.ddp.hooks.exact_sums import (
    BLOCK,
    ExactSum,
    cut,
    shifts_of,
    tops_of,
    write_totals,
)


def term(number, numel, spread):
    """Return values of many magnitudes, on average 2**(7·number mod spread)."""
    generator = torch.Generator().manual_seed(number)
    tens = torch.randint(-spread, spread + 1, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0**tens
    return (values * 2.0 ** (7 * number % (spread + 1))).float()


def total(groups):
    """Return the pieces of several sums' sum."""
    sums = []
    for group in groups:
        held = ExactSum(group[0])
        for one in group[1:]:
            held.add(one)
        sums.append(held)
    tops = torch.stack([held.tops for held in sums]).amax(0)
    for held in sums:
        held.raise_to(tops)
    return sum(held.high for held in sums), sum(held.low for held in sums)


@pytest.mark.parametrize("spread", [0, 3, 30])
@pytest.mark.parametrize("numel", [1, 100, BLOCK, 3 * BLOCK + 17])
def test_no_order_or_grouping_changes_a_bit(numel, spread):
    terms = [term(number, numel, spread) for number in range(12)]
    found = set()
    for seed in range(8):
        order = list(terms)
        random.Random(seed).shuffle(order)
        cuts = sorted(random.Random(seed).sample(range(1, 12), seed % 4))
        groups = [order[a:b] for a, b in itertools.pairwise([0, *cuts, 12])]
        high, low = total(groups)
        found.add((high.numpy().tobytes(), low.numpy().tobytes()))
    assert len(found) == 1
    # The plain sums do differ, so the test can fail.
    plain = {sum(order).numpy().tobytes() for order in (terms, terms[::-1], terms[5:] + terms[:5])}
    assert len(plain) > 1 or numel == 1


def test_the_error_is_below_that_of_plain_sums():
    terms = [term(number, BLOCK, 2) for number in range(12)]
    high, low = total([terms])
    got, plain = (high + low).view(-1), sum(terms)
    exact = [sum(Fraction(float(one[place])) for one in terms) for place in range(BLOCK)]
    largest = max(map(abs, exact))

    def error(values):
        return (
            max(abs(Fraction(float(a)) - b) for a, b in zip(values, exact, strict=True)) / largest
        )

    assert error(got) < 2.0**-exact_sums.WIDTH * 12 < error(plain)


def test_terms_of_one_magnitude_have_no_error():
    terms = [torch.randn(500, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    high, low = total([terms])
    assert torch.equal((high + low).view(-1), sum(one.double() for one in terms))


def test_the_top_is_the_least_whose_unit_holds_the_block():
    width = exact_sums.WIDTH
    for exponent in (-149, -126, -37, -36, -35, -1, 0, 1, 34, 35, 36, 71, 127):
        for value in (2.0**exponent, 1.999 * 2.0 ** (exponent - 1)):
            block = torch.tensor([0.0, value, -value / 2])
            (top,) = tops_of(block)[0].tolist()
            largest = float(block.max())
            assert not largest or largest < 2.0 ** (width * (top + 1) - 1)
            assert not largest or largest >= 2.0 ** (width * top - 1)
    (one,) = tops_of(torch.ones(1))[0].tolist()
    tops, is_finite = tops_of(torch.zeros(BLOCK + 3))
    assert tops.tolist() == [exact_sums.NO_TOP] * 2 and is_finite
    flat = torch.zeros(BLOCK + 2)
    flat[:2], flat[BLOCK] = torch.tensor([math.inf, 1.0]), math.nan
    tops, is_finite = tops_of(flat)
    assert tops.tolist() == [one, exact_sums.NO_TOP] and not is_finite


def test_pieces_are_multiples_of_their_units():
    flat = term(1, 2 * BLOCK, 20)
    tops, is_finite = tops_of(flat)
    blocks = flat.view(2, BLOCK)
    high, low = (torch.empty_like(blocks, dtype=torch.float64) for _ in range(2))
    cut(blocks, shifts_of(tops), is_finite, high, low)
    for piece, below in ((high, 0), (low, 1)):
        units = 2.0 ** (exact_sums.WIDTH * (tops - below).double())[:, None]
        assert bool(((piece / units).frac() == 0).all())
        assert float((piece / units).abs().max()) <= 2.0 ** (exact_sums.WIDTH - 1)
    # As many additions do not leave 53 bits.
    assert exact_sums.MOST_TERMS * 2.0 ** (exact_sums.WIDTH - 1) <= 2.0**53


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, math.inf), math.inf),
        ((math.inf, 1.0), math.inf),
        ((-math.inf, -1.0), -math.inf),
        ((math.inf, -math.inf), math.nan),
        ((math.nan, 1.0), math.nan),
        ((math.inf, 2.0**10), math.inf),
    ],
)
def test_infinities_and_nan_are_those_of_a_plain_sum(values, expected):
    high, low = total([[torch.tensor([value, 3.0]) for value in values]])
    first, other = (high + low).view(-1).tolist()
    assert first == expected or (math.isnan(first) and math.isnan(expected))
    assert other == 6.0


def close_and_far(numel):
    """Return terms whose total is a float64, and terms whose total is not."""
    close = [term(number, numel, 0) for number in range(5)]
    far = [torch.full((numel,), 2.0**33 * 1.3), torch.full((numel,), 1.0 + 2.0**-23)]
    return close, far


@pytest.mark.parametrize("numel", [1, 100, BLOCK, 3 * BLOCK + 17, 9 * BLOCK])
def test_totals_and_what_they_lack_are_the_sum(numel):
    for place, terms in enumerate(close_and_far(numel)):
        held = ExactSum(terms[0])
        for one in terms[1:-1]:
            held.add(one)
        high, low = total([terms])
        high, low = high.view(-1)[:numel], low.view(-1)[:numel]
        tops = torch.maximum(held.tops, tops_of(terms[-1])[0])
        totals, rest = torch.empty(2, numel, dtype=torch.float64)
        lost = torch.zeros(1, dtype=torch.float64)
        write_totals(terms[-1], held, tops, True, totals, lost)
        assert bool(lost) == bool(place) and torch.equal(totals, high + low)
        write_totals(terms[-1], held, tops, True, rest, lost, is_rest=True)
        assert torch.equal(rest, (high - totals) + low) and bool(rest.any()) == bool(place)
    assert not ExactSum(torch.empty(0)).high.numel()
    # Of one term nothing is lost, and what is below half of the lower unit is dropped.
    alone = torch.tensor([2.0**34, 2.0**-36, 2.0**-37, -0.0])
    totals, rest = torch.empty(2, 4, dtype=torch.float64)
    write_totals(alone, None, tops_of(alone)[0], True, totals, lost.zero_())
    write_totals(alone, None, tops_of(alone)[0], True, rest, lost, is_rest=True)
    assert totals.tolist() == [2.0**34, 2.0**-36, 0.0, 0.0] and not lost and not rest.any()
    assert not totals.signbit().any()


def test_memory_of_an_earlier_sum_changes_no_bit():
    for numel in (1, BLOCK + 17):
        earlier, first = term(1, numel, 30), term(2, numel, 3)
        held, fresh = ExactSum(first, ExactSum(earlier).memory), ExactSum(first)
        for one in (held, fresh):
            one.add(earlier)
        assert torch.equal(held.tops, fresh.tops) and torch.equal(held.memory, fresh.memory)
        assert held.high.data_ptr() == held.memory.data_ptr()


def test_a_total_that_is_not_finite_lacks_nothing():
    held = ExactSum(torch.tensor([math.inf, math.nan, -math.inf, 1.0]))
    assert not held.is_finite
    totals, rest = torch.empty(2, 4, dtype=torch.float64)
    lost, term = torch.zeros(1, dtype=torch.float64), torch.tensor([1.0, 1.0, math.inf, 2.0])
    write_totals(term, held, held.tops, False, totals, lost)
    write_totals(term, held, held.tops, False, rest, lost, is_rest=True)
    assert lost.isnan() and not rest.any()
    assert totals[0] == math.inf and totals[1:3].isnan().all() and totals[3] == 3.0
