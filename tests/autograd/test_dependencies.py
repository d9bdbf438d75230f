"""Masks, captures and cuts against brute force."""

from __future__ import annotations

import random

import pytest
import torch

from mpidist.autograd.dependencies import Plan
from mpidist.autograd.recording import LEAF, RECEIVE, Send, received


def below(node, seen):
    """Return a node and all nodes of the pass below it."""
    if node is not None and node not in seen:
        seen.add(node)
        if type(node) not in (LEAF, RECEIVE):
            for other, _ in node.next_functions:
                below(other, seen)
    return seen


def graph(rng):
    (came,) = received([torch.ones(2, requires_grad=True)])
    values = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), came]
    for _ in range(rng.randint(2, 25)):
        first, second = rng.choice(values), rng.choice(values[-3:])
        values.append(rng.choice([first + second, first.exp(), torch.cat([first, second])[:2]]))
    sends = [Send(0, True, rng.sample(values, rng.randint(1, 2))) for _ in range(rng.randint(1, 6))]
    return sends


@pytest.mark.parametrize("seed", range(80))
def test_plans_equal_brute_force(seed):
    sends = graph(random.Random(seed))
    sources = [send.next_functions for send in sends]
    plan = Plan(dict(enumerate(sources)))
    reached = [set().union(*(below(node, set()) for node, _ in edges)) for edges in sources]
    masks = {
        node: sum(1 << place for place, nodes in enumerate(reached) if node in nodes)
        for node in set().union(*reached)
    }
    assert plan.masks == masks
    found = {
        node: mask for mask, one in plan.captures.items() for node in (*one.leaves, *one.receives)
    }
    assert found == {node: mask for node, mask in masks.items() if type(node) in (LEAF, RECEIVE)}
    assert all(type(node) is LEAF for one in plan.captures.values() for node in one.leaves)
    edges = {
        (mask, edge)
        for node, mask in masks.items()
        if type(node) not in (LEAF, RECEIVE)
        for edge in node.next_functions
        if edge[0] is not None and masks[edge[0]] != mask
    }
    assert {(mask, edge) for mask, cut in plan.cuts.items() for edge in cut} == edges
    if len(sources) > 1:
        places = {node: place for place, node in enumerate(plan.order)}
        assert set(plan.order) == set(masks) and len(places) == len(plan.order)
        assert all(
            places[other] < places[node]
            for node in masks
            if type(node) not in (LEAF, RECEIVE)
            for other, _ in node.next_functions
            if other is not None
        )
        mask = next(iter(plan.cuts), 0)
        cut = set(list(plan.cuts.get(mask, ()))[:1])
        ready = {
            node for node in masks if masks[node] == mask and type(node) not in (LEAF, RECEIVE)
        }
        above = {
            node
            for node in ready
            if cut & {edge for one in below(node, set()) & ready for edge in one.next_functions}
        }
        found = plan.above(cut, {mask})
        assert set(found) == above and found == sorted(above, key=places.get, reverse=True)


def test_no_sources_and_deep_graphs():
    assert not Plan({}).masks
    value = leaf = torch.ones(1, requires_grad=True)
    # The graph is deeper than Python's stack.
    for _ in range(20_000):
        value = value * 1
    for sources in ([[value]], [[value], [value]]):
        plan = Plan({place: Send(0, True, one).next_functions for place, one in enumerate(sources)})
        (captures,) = plan.captures.values()
        assert [node.variable is leaf for node in captures.leaves] == [True] and len(
            plan.masks
        ) == 20_001
    # The graph is freed from the top, because torch's own recursion is bounded.
    while value.grad_fn is not None:
        value = torch.ones(1)
