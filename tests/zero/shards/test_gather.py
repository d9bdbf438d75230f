"""Gather of all shards: by memory or by a wire, and not at all where nothing is to be copied."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpidist.zero.shards.shards import Shards


class RecordedWire:
    """Wire that records its calls."""

    def __init__(self, calls):
        self._calls = calls

    def share(self, group, *arguments):
        self._calls.append(arguments)


def gathered(size, is_single_node=True, is_one_copy=False, has_wire=False):
    """Return the calls of one gather of two buffers."""
    calls = []
    group = SimpleNamespace(size=size, is_single_node=is_single_node)
    wire = RecordedWire(calls) if has_wire else None
    shards = Shards(group, "greedy", torch.numel, one_copy=False, wire=wire)
    shards.plans, shards.flats = [SimpleNamespace(bounds=0), SimpleNamespace(bounds=1)], ["a", "b"]
    shards.masters.flats = ["own a", "own b"]
    shards.masters.mark_current = calls.append
    shards.is_one_copy = is_one_copy
    shards._buffers = [SimpleNamespace(gather=lambda: calls.append("gather"))] * 2
    shards.gather()
    return calls


def test_one_rank_has_all_parameters():
    assert gathered(1) == []


def test_a_wire_shares_each_buffer_and_leaves_the_masters_current():
    assert gathered(2, has_wire=True) == [("own a", "a", 0), ("own b", "b", 1), []]


@pytest.mark.parametrize("is_one_copy", [False, True])
@pytest.mark.parametrize("is_single_node", [False, True])
def test_only_one_copy_on_one_node_is_complete_without_a_gather(is_one_copy, is_single_node):
    calls = gathered(4, is_single_node, is_one_copy)
    assert calls == ([] if is_one_copy and is_single_node else ["gather"] * 2)
