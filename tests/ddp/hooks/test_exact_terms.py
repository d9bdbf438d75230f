"""Exact means of terms: the bits of the means of their exact sums."""

from __future__ import annotations

import math

import pytest
import torch

from mpidist.ddp.hooks import exact_terms
from mpidist.ddp.hooks.exact_sums import (
    BLOCK,
    MOST_TERMS,
    NO_TOP,
    WIDTH,
    ExactSum,
    bounds_of,
    tops_of,
)
from mpidist.ddp.hooks.exact_terms import write_means


def naive(terms, lengths):
    """Return the means of terms by exact sums of each block."""
    means, start = [], 0
    for length in lengths:
        held = ExactSum.of(terms[0, start : start + length].float())
        for term in terms[1:]:
            held.add(term[start : start + length].float())
        mean = (held.high + held.low).div(len(terms)).float()
        means.append(mean.view(-1).to(terms.dtype))
        start += length
    return torch.cat(means)


def lengths_of(numel):
    return [BLOCK] * (numel // BLOCK) + [numel % BLOCK] * (numel % BLOCK > 0)


def found(terms, lengths, shares):
    """Return the means of terms, computed in equal shares; float32 must not change a bit."""
    bounds = bounds_of(tuple(lengths))
    tops = [max(of) for of in zip(*(tops_of(term, bounds)[0] for term in terms), strict=True)]
    whole = terms.shape[1] + -terms.shape[1] % shares
    padded = torch.nn.functional.pad(terms, (0, whole - terms.shape[1]))
    results = []
    for lowest in (exact_terms._LOWEST, math.inf):
        means = torch.empty(whole, dtype=terms.dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact_terms, "_LOWEST", lowest)
            for place, (part, mean) in enumerate(
                zip(padded.chunk(shares, 1), means.chunk(shares), strict=True)
            ):
                write_means(part, tops, bounds, mean, len(terms), place=place)
        results.append(means[: terms.shape[1]])
    assert same_bits(*results)
    return results[0]


def same_bits(first, second):
    as_bytes = [t.contiguous().view(torch.uint8) for t in (first, second)]
    return first.dtype == second.dtype and torch.equal(*as_bytes)


def values(count, lengths, spread, seed=0):
    """Return terms of many magnitudes; blocks differ by up to 2**(2·spread)."""
    generator = torch.Generator().manual_seed(seed)
    tens = torch.randint(-spread, spread + 1, (count, sum(lengths)), generator=generator)
    terms = torch.randn(tens.shape, generator=generator, dtype=torch.float64) * 2.0**tens
    shifts = torch.randint(-spread, spread + 1, (len(lengths),), generator=generator)
    return (terms * 2.0 ** shifts.repeat_interleave(torch.tensor(lengths)).double()).float()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 32, 33])
@pytest.mark.parametrize("spread", [0, 12, 24, 60])
def test_means_have_the_bits_of_those_of_exact_sums(count, spread):
    lengths = [*lengths_of(2 * BLOCK + 17), 1, 30, 500]
    for seed in range(2):
        terms = values(count, lengths, spread, seed)
        # Pairs that cancel, but for what a third term adds; zeros of both signs.
        terms[-1, ::3] = -terms[0, ::3]
        terms[:, 5:90:7] = -0.0
        terms[:, BLOCK + 3 : BLOCK + 60] *= 2.0**-40
        terms[:, 1 - 531 :][:, :30] = 0.0 if seed else -0.0
        assert same_bits(found(terms, lengths, max(count % 5, 1)), naive(terms, lengths))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ties_go_where_those_of_exact_sums_go(count):
    """Halves of the last unit, odd and even, of both signs, and sums that are ties in float32."""
    small = torch.arange(-60, 61) * 2.0**-37
    large = 2.0 ** torch.arange(-14, 35).double()
    row = torch.cat([small, large.float(), -large.float(), large.float() + 2.0**-12, torch.ones(1)])
    row = torch.cat([row, torch.full((1,), 2.0**34)])
    terms = torch.stack([row.roll(17 * place) * (-1) ** (place > 1) for place in range(count)])
    terms[:, -1] = 2.0**34
    lengths = lengths_of(len(row))
    assert same_bits(found(terms, lengths, 3), naive(terms, lengths))


@pytest.mark.parametrize("exponent", [-149, -145, -126, -109, -108, -73, -72, 71, 107, 108, 126])
def test_subnormals_and_the_largest_numbers(exponent):
    for count in (1, 2, 3, 4):
        terms = torch.arange(1.0, 41.0).repeat(count, 1).double()
        terms[1:] *= -0.37
        terms = (terms / 64).mul(2.0**exponent).float()
        terms[0, 0] = 2.0**exponent
        terms[:, 3] = torch.finfo(torch.float32).smallest_normal / 8
        terms[:, 4] = -(2.0**-149)
        assert same_bits(found(terms, [40], 2), naive(terms, [40]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3])
def test_half_types_are_rounded_once_more(dtype, count):
    lengths = lengths_of(BLOCK + 9)
    terms = values(count, lengths, 5).to(dtype)
    assert same_bits(found(terms, lengths, 2), naive(terms, lengths))


def test_zeros_have_no_top_and_no_sign():
    terms = torch.full((2, 6), -0.0)
    assert tops_of(terms[0], bounds_of((6,)))[0] == [NO_TOP]
    assert same_bits(found(terms, [6], 2), torch.zeros(6))


def test_parts_of_whole_numbers_have_exact_sums():
    """The largest numbers of both parts, of the most terms of each dtype."""
    largest = 2.0 ** (2 * WIDTH - 1)
    for dtype, terms in ((torch.float32, exact_terms._MOST_TERMS), (torch.float64, MOST_TERMS)):
        shift = torch.tensor(exact_terms._SHIFTS[dtype], dtype=dtype)
        below, above = shift - largest, shift + largest
        unit = 2.0 * float(shift * torch.finfo(dtype).eps) / 3  # of shift's last place
        assert below >= shift * 2 / 3 and above <= shift * 4 / 3
        assert terms * largest / unit <= 2.0**53 and terms * unit / 2 <= 2.0**53
