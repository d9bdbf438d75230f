"""Owners of parameters against naive twins, for random sizes and known networks."""

from __future__ import annotations

import itertools
import math
import runpy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.zero.shards import partition
from mpidist.zero.shards.partition import balanced, cost_of, cuts, greedy, is_element_wise, require
from tests.tools.support import ROOT

# Imported by path: other projects have packages of the name benchmarks.
LISTS = runpy.run_path(str(ROOT / "benchmarks" / "training" / "gradient_lists.py"))["LISTS"]
SIZES = st.lists(st.integers(0, 200), max_size=40)
RANKS = st.integers(1, 9)


def naive(order, costs, loads):
    """Assign parameters, in an order, each to the first rank with the smallest load."""
    owners, loads = {}, list(loads)
    for place in order:
        least = min(range(len(loads)), key=lambda rank: loads[rank])
        owners[place] = least
        loads[least] += costs[place]
    return [owners[place] for place in range(len(costs))], loads


@settings(max_examples=100, deadline=None)
@given(SIZES, RANKS, st.integers(0, 3))
def test_greedy_and_balanced_are_their_naive_twins(sizes, ranks, earlier):
    loads = [(earlier * 7 * rank) % 11 for rank in range(ranks)]
    assert greedy(sizes, loads) == naive(range(len(sizes)), sizes, loads)
    by_cost = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    assert balanced(sizes, loads) == naive(by_cost, sizes, loads)


def test_greedy_is_fairscales_rule_of_thumb():
    # A net with a large head: rank 0 owns the head alone, the others own the rest.
    owners, loads = greedy([100, 10, 10, 1, 30, 5], [0, 0, 0])
    assert owners == [0, 1, 2, 1, 2, 1] and loads == [100, 16, 40]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), RANKS)
def test_cuts_are_equal_up_to_a_unit(units, ranks):
    bounds = cuts(units * 64, ranks, 64)
    lengths = [end - first for first, end in itertools.pairwise(bounds)]
    assert len(bounds) == ranks + 1 and bounds[0] == 0 and bounds[-1] == units * 64
    assert not any(bound % 64 for bound in bounds) and max(lengths) - min(lengths) <= 64


@pytest.mark.parametrize("network", ["ResNet-50", "GPT-2"])
@pytest.mark.parametrize("cost", ["bytes", "matrix"])
def test_balance_of_known_networks_over_8_ranks(network, cost):
    parameters = [torch.empty(shape, device="meta") for shape in LISTS[network]()]
    costs = [cost_of(cost, torch.optim.SGD)(parameter) for parameter in parameters]
    owners, loads = balanced(costs, [0] * 8)
    assert loads == [
        sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(8)
    ]
    mean = sum(costs) / 8
    assert max(loads) <= 1.02 * mean or max(loads) == max(costs), (
        f"{max(loads) / mean:.3f} of the mean"
    )


def test_cost_of_a_parameter():
    class Shampoo(torch.optim.SGD):
        pass

    conv, vector, scalar, none = (
        torch.empty(8, 3, 2, 2),
        torch.empty(5),
        torch.empty(()),
        torch.empty(0, 4),
    )
    assert [cost_of(None, torch.optim.Adam)(p) for p in (conv, vector, scalar, none)] == [
        384,
        20,
        4,
        0,
    ]
    for optim in (torch.optim.Muon, Shampoo, type("Mine", (Shampoo,), {})):
        assert [cost_of(None, optim)(p) for p in (conv, vector, scalar, none)] == [
            12 * 8**2,
            5,
            1,
            0,
        ]
    assert cost_of("bytes", torch.optim.Muon)(conv.double()) == 768
    assert cost_of(torch.numel, torch.optim.Muon)(conv) == math.prod(conv.shape)
    with pytest.raises(ValueError, match="cost is"):
        cost_of("flops", torch.optim.SGD)


def test_which_classes_may_step_parts_of_a_parameter():
    class Norms(torch.optim.Adam):
        """Optimizer that is not known to be element-wise."""

    class Declared(Norms):
        is_element_wise = True

    class Heir(Declared):
        """Subclass that does not declare ``is_element_wise`` itself."""

    assert is_element_wise(torch.optim.Adam) and is_element_wise(Declared)
    assert not any(
        map(
            is_element_wise,
            (Norms, Heir, torch.optim.Muon, torch.optim.LBFGS, torch.optim.Adafactor),
        )
    )
    assert is_element_wise(torch.optim.SparseAdam) is False


@pytest.mark.parametrize(
    ("kind", "optim", "error", "words"),
    [
        ("flat", torch.optim.Muon, ValueError, "Muon is not known to treat each element by itself"),
        ("flat", torch.optim.Adafactor, ValueError, "Take 'balanced'"),
        ("greedy", torch.optim.LBFGS, ValueError, "inner products"),
        ("striped", torch.optim.SGD, ValueError, "'greedy', 'balanced', 'flat'; got 'striped'"),
        ("greedy", torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), TypeError, "is a class"),
        ("greedy", dict, TypeError, "is a class"),
        ("greedy", "SGD", TypeError, "is a class"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_reason(kind, optim, error, words):
    with pytest.raises(error, match=words):
        require(kind, optim)


def test_what_can_be_sharded_is_not_refused():
    for kind in partition.PARTITIONS:
        require(kind, torch.optim.AdamW)
    require("balanced", torch.optim.Muon)
