"""Parameter gather: by memory or by a wire, and not at all where nothing is to be copied."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpidist.zero.step.parameter_gather import ParameterGather


class Record:
    """Shards, masters and a wire of two buffers, with the calls that reach them."""

    def __init__(self, is_one_copy=False):
        self.calls = []
        self.masters = SimpleNamespace(
            flats=["own 0", "own 1"], mark_current=lambda pieces: self.calls.append(pieces)
        )
        self.shards = SimpleNamespace(
            plans=[SimpleNamespace(bounds=0), SimpleNamespace(bounds=1)],
            flats=["flat 0", "flat 1"],
            masters=self.masters,
            pieces="pieces",
            is_one_copy=is_one_copy,
            gather=lambda: self.calls.append("gather"),
        )

    def share(self, group, *arguments):
        self.calls.append(arguments)


def group_of(size, is_single_node=True):
    return SimpleNamespace(size=size, is_single_node=is_single_node)


@pytest.mark.parametrize("has_wire", [False, True])
def test_one_rank_has_all_parameters(has_wire):
    record = Record()
    ParameterGather(group_of(1), record.shards, record if has_wire else None).run()
    assert record.calls == []


def test_a_wire_shares_each_buffer_and_leaves_the_masters_current():
    record = Record()
    ParameterGather(group_of(2), record.shards, record).run()
    assert record.calls == [("own 0", "flat 0", 0), ("own 1", "flat 1", 1), "pieces"]


@pytest.mark.parametrize("is_one_copy", [False, True])
@pytest.mark.parametrize("is_single_node", [False, True])
def test_only_one_copy_on_one_node_is_complete_without_a_gather(is_one_copy, is_single_node):
    record = Record(is_one_copy)
    ParameterGather(group_of(4, is_single_node), record.shards, None).run()
    assert record.calls == ([] if is_one_copy and is_single_node else ["gather"])
