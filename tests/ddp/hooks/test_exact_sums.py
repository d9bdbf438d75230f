"""Exact sums: one result for any order and grouping, close to the exact one."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from mpidist.ddp.hooks import exact_sums
from mpidist.ddp.hooks.exact_sums import (
    BLOCK,
    NO_TOP,
    ExactSum,
    bounds_of,
    cut,
    joined,
    largest_of,
    runs_of,
    units_of,
    write_totals,
)


@pytest.fixture(params=["host", "device"], autouse=True)
def arrays(request, monkeypatch):
    """NumPy's arrays on the host, or tensors as on a device, here in the host's memory."""
    if request.param == "device":
        monkeypatch.setattr(exact_sums, "_array", lambda tensor: tensor)


def term(number, numel, spread):
    """Return values of many magnitudes, on average 2**(7·number mod spread)."""
    generator = torch.Generator().manual_seed(number)
    tens = torch.randint(-spread, spread + 1, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0**tens
    return (values * 2.0 ** (7 * number % (spread + 1))).float()


def tops_of(flat):
    return exact_sums.tops_of(flat, bounds_of((len(flat),)))


def total(groups):
    """Return the pieces of several sums' sum."""
    sums = []
    for group in groups:
        held = ExactSum.of(group[0])
        for one in group[1:]:
            held.add(one)
        sums.append(held)
    tops = [max(found) for found in zip(*(held.tops for held in sums), strict=True)]
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
            (top,) = tops_of(block)[0]
            largest = float(block.max())
            assert not largest or largest < 2.0 ** (width * (top + 1) - 1)
            assert not largest or largest >= 2.0 ** (width * top - 1)
    (one,) = tops_of(torch.ones(1))[0]
    tops, is_finite = tops_of(torch.zeros(BLOCK + 3))
    assert tops == [exact_sums.NO_TOP] * 2 and is_finite
    flat = torch.zeros(BLOCK + 2)
    flat[:2], flat[BLOCK] = torch.tensor([math.inf, 1.0]), math.nan
    tops, is_finite = tops_of(flat)
    assert tops == [one, exact_sums.NO_TOP] and not is_finite


def test_pieces_are_multiples_of_their_units():
    flat = term(1, 2 * BLOCK, 20)
    tops, is_finite = tops_of(flat)
    for block, top in zip(flat.view(2, BLOCK), tops, strict=True):
        pieces = torch.empty(2, BLOCK, dtype=torch.float64)
        cut(block, top, is_finite, *pieces)
        on_host = np.empty((2, BLOCK))
        cut(block.numpy(), top, is_finite, *on_host)
        assert torch.equal(pieces, torch.from_numpy(on_host))
        for piece, below in zip(pieces, (0, 1), strict=True):
            units = 2.0 ** (exact_sums.WIDTH * (top - below))
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
        held = ExactSum.of(terms[0])
        for one in terms[1:-1]:
            held.add(one)
        high, low = total([terms])
        high, low = high.view(-1)[:numel], low.view(-1)[:numel]
        tops = [*map(max, held.tops, tops_of(terms[-1])[0])]
        totals, rest = torch.empty(2, numel, dtype=torch.float64)
        lost = torch.zeros(1, dtype=torch.float64)
        write_totals(terms[-1], held, tops, held.bounds, True, totals, lost)
        assert bool(lost) == bool(place) and torch.equal(totals, high + low)
        write_totals(terms[-1], held, tops, held.bounds, True, rest, lost, is_rest=True)
        assert torch.equal(rest, (high - totals) + low) and bool(rest.any()) == bool(place)
    assert not ExactSum.of(torch.empty(0)).high.numel()
    # Of one term nothing is lost, and what is below half of the lower unit is dropped.
    alone = torch.tensor([2.0**34, 2.0**-36, 2.0**-37, -0.0])
    totals, rest = torch.empty(2, 4, dtype=torch.float64)
    write_totals(alone, None, tops_of(alone)[0], bounds_of((4,)), True, totals, lost.zero_())
    write_totals(alone, None, tops_of(alone)[0], bounds_of((4,)), True, rest, lost, is_rest=True)
    assert totals.tolist() == [2.0**34, 2.0**-36, 0.0, 0.0] and not lost and not rest.any()
    assert not totals.signbit().any()


def test_memory_of_an_earlier_sum_changes_no_bit():
    for numel in (1, BLOCK + 17):
        earlier, first = term(1, numel, 30), term(2, numel, 3)
        held, fresh = ExactSum.of(first, ExactSum.of(earlier).memory), ExactSum.of(first)
        for one in (held, fresh):
            one.add(earlier)
        assert held.tops == fresh.tops and torch.equal(held.memory, fresh.memory)
        assert held.high.data_ptr() == held.memory.data_ptr()


def test_a_total_that_is_not_finite_lacks_nothing():
    held = ExactSum.of(torch.tensor([math.inf, math.nan, -math.inf, 1.0]))
    assert not held.is_finite
    totals, rest = torch.empty(2, 4, dtype=torch.float64)
    lost, term = torch.zeros(1, dtype=torch.float64), torch.tensor([1.0, 1.0, math.inf, 2.0])
    write_totals(term, held, held.tops, held.bounds, False, totals, lost)
    write_totals(term, held, held.tops, held.bounds, False, rest, lost, is_rest=True)
    assert bool(lost) and not rest.any()
    assert totals[0] == math.inf and totals[1:3].isnan().all() and totals[3] == 3.0


@pytest.mark.parametrize("numels", [(2 * BLOCK + 1,), (3, BLOCK, 0, BLOCK, 7, 7, 7), (1,), (0,)])
def test_blocks_of_several_tensors(numels):
    bounds, flat = bounds_of(numels), term(1, sum(numels), 30)
    blocks = [block for one in flat.split(numels) if len(one) for block in one.split(BLOCK)]
    assert [end - start for start, end in itertools.pairwise(bounds)] == [
        len(block) for block in blocks
    ]
    largest = largest_of(flat, bounds)
    assert largest == [float(block.abs().max()) for block in blocks]
    tops, is_finite = exact_sums.tops_of(flat, bounds)
    assert is_finite and tops == [tops_of(block)[0][0] for block in blocks]
    for block in blocks[::2]:
        block[-1], block[0] = math.nan, -math.inf
    assert [math.isfinite(size) for size in largest_of(flat, bounds)] == [
        bool(block.isfinite().all()) for block in blocks
    ]


def test_runs_of_blocks_of_one_top():
    """Every block is in runs of its own top, none longer than it may be."""
    bounds = bounds_of((5, 3 * BLOCK + 2, 9))
    tops = [NO_TOP, 1, 1, NO_TOP, 2, 2]
    assert units_of(tops) == [2, 1, 1, 2, 2, 2]
    assert units_of([NO_TOP] * 2) == [0, 0]
    assert list(runs_of(units_of(tops), bounds, BLOCK)) == [
        (0, 5, 2),
        (5, BLOCK, 1),
        (BLOCK + 5, BLOCK, 1),
        (2 * BLOCK + 5, BLOCK, 2),
        (3 * BLOCK + 5, 11, 2),
    ]
    assert list(runs_of([3, 3, 4], (0, 5, 5, 5))) == [(0, 5, 3)]
    assert not list(runs_of([], bounds_of((0,)))) and not list(runs_of([1], (0, 0)))


def test_joined_sums_are_those_of_each_tensor():
    numels = (5, BLOCK + 3, 2, 1)
    memory = torch.full((2, sum(numels)), math.nan, dtype=torch.float64)
    parts = memory.split(numels, 1)
    first = [term(place, numel, 3) for place, numel in enumerate(numels)]
    first[3][0] = math.inf
    # In memory of its own, in that of all, and no sum.
    sums = [ExactSum.of(first[0]), ExactSum.of(first[1], parts[1]), None, ExactSum.of(first[3])]
    held = joined(sums, parts, memory)
    assert held.tops == [top for one in sums for top in ([NO_TOP] if one is None else one.tops)]
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    assert torch.equal(memory, torch.cat([one.memory if one else zeros for one in sums], 1))
    assert not held.is_finite and held.bounds == bounds_of(numels)
