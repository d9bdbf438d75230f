"""Comparisons between ranks: first difference, one rank's error on all ranks, texts."""

from __future__ import annotations

import pytest

from mpidist.comm.consistency import (
    by_rank,
    comparing,
    converting_errors,
    first_difference,
    maximum,
    raising_on_all,
    require_same,
    same_error_on_all,
    summary,
    values_that_differ,
)
from mpidist.errors import CheckpointError, DisagreementError, RankFailureError
from tests.tools.support import agree, raises_on_all


@pytest.mark.mpi
def test_equal_rows_pass_and_different_ones_name_the_first(group):
    require_same(group, "here", [("a", 1), ("b", (2, "x"))])
    if group.size == 1:
        return
    rows = [("a", 1), ("b", group.rank), ("c", group.rank)]
    message = raises_on_all(
        group, DisagreementError, lambda: require_same(group, "here", rows), "here: ranks differ"
    )
    agree(group, f"rank {group.rank}: b {group.rank}" in message and " c " not in message, message)
    rows = [("a", 1)] * (1 + (group.rank == 0))
    raises_on_all(
        group, DisagreementError, lambda: require_same(group, "here", rows), "rank 1: nothing"
    )


@pytest.mark.mpi
@pytest.mark.parametrize("block", [comparing, raising_on_all])
def test_an_error_keeps_its_class_on_its_rank_and_is_named_on_the_others(group, block):
    last = group.size - 1

    def fail():
        with block(group, "here"):
            if group.rank == last:
                raise OSError("no room")

    kind = OSError if group.rank == last else DisagreementError
    words = "no room" if group.rank == last else f"here was refused. rank {last}: OSError: no room"
    raises_on_all(group, kind, fail, words)
    with block(group, "here"):
        pass


@pytest.mark.mpi(min_size=2)
def test_rows_of_a_block_are_compared(group):
    def compare():
        with comparing(group, "here") as rows:
            rows.append(("a", group.rank))

    raises_on_all(group, DisagreementError, compare, "rank 0: a 0; rank 1: a 1")


@pytest.mark.mpi
def test_one_value_is_compared(group):
    agree(group, values_that_differ(group, "x") is None)
    texts = values_that_differ(group, group.rank)
    agree(group, texts == (None if group.size == 1 else by_rank(range(group.size))), str(texts))


@pytest.mark.mpi
def test_the_maximum_is_taken_over_all_ranks(group):
    agree(
        group,
        maximum(group, group.rank) == group.size - 1
        and maximum(group, 2 if group.rank == 0 else 0) == 2,
    )


@pytest.mark.mpi
def test_all_ranks_raise_one_text(group):
    last = group.size - 1

    def fail():
        with same_error_on_all(group, CheckpointError, "here"):
            if group.rank == last:
                raise OSError("disk full")

    text = raises_on_all(group, CheckpointError, fail, "disk full")
    agree(group, len(set(group.all_gather_object(text))) == 1, text)
    with same_error_on_all(group, CheckpointError, "here"):
        pass


def test_errors_of_the_communication_keep_their_class():
    with pytest.raises(RankFailureError), converting_errors(CheckpointError, "here"):
        raise RankFailureError("gone")
    with (
        pytest.raises(CheckpointError, match="here: no"),
        converting_errors(CheckpointError, "here"),
    ):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("texts", "summarized"),
    [
        (["a"], "a"),
        (["a", "a"], "a"),
        ([None, "a"], "rank 1: a"),
        (["a", "b", "a", None], "ranks 0, 2: a; rank 1: b"),
        ([*["a"] * 9, None], "ranks 0-8: a"),
    ],
)
def test_equal_texts_are_joined(texts, summarized):
    assert summary(texts) == summarized


def test_the_first_place_that_differs_is_returned_with_all_values():
    assert first_difference([[1, 2], [1, 2]]) is None
    assert first_difference([[1, 2, 3], [1, 5, 6]]) == (1, [2, 5])
    assert first_difference([[1], [1, 4]]) == (1, [None, 4])
    assert by_rank(["a", None, 0]) == "rank 0: a; rank 2: 0"


@pytest.mark.mpi
def test_an_exchange_of_our_own_is_none_of_the_users_calls(group):
    before = group.journal.own
    assert maximum(group, group.rank) == group.size - 1
    assert group.journal.own == before + (group.size > 1)


@pytest.mark.mpi(min_size=2)
def test_without_an_error_nothing_more_is_exchanged(group):
    before = group.journal.sequence
    with raising_on_all(group, "here"):
        pass
    assert group.journal.sequence == before + 1
