"""Comparisons between ranks: who differs, who refuses, and that all hear of it."""

from __future__ import annotations

import pytest

from mpidist.errors import DisagreementError
from mpidist.zero.verdict import highest, raise_together, require_alike
from tests.support import agree, raises_on_all

pytestmark = pytest.mark.mpi


def test_equal_rows_pass_and_different_ones_name_the_first(group):
    require_alike(group, "here", [("a", 1), ("b", (2, "x"))])
    if group.size == 1:
        return
    rows = [("a", 1), ("b", group.rank), ("c", group.rank)]
    message = raises_on_all(
        group, DisagreementError, lambda: require_alike(group, "here", rows), "here: ranks differ"
    )
    agree(group, f"rank {group.rank}: b {group.rank}" in message and " c " not in message, message)
    rows = [("a", 1)] * (1 + (group.rank == 0))
    raises_on_all(
        group, DisagreementError, lambda: require_alike(group, "here", rows), "rank 1: nothing"
    )


def test_an_error_is_raised_where_it_is_and_told_elsewhere(group):
    last = group.size - 1
    for call in (require_alike, raise_together):
        error = OSError("no room") if group.rank == last else None
        arguments = (group, "here", (), error) if call is require_alike else (group, "here", error)
        kind = OSError if group.rank == last else DisagreementError
        words = (
            "no room" if group.rank == last else f"here was refused. rank {last}: OSError: no room"
        )
        raises_on_all(group, kind, lambda call=call, arguments=arguments: call(*arguments), words)
        raise_together(group, "here", None)


def test_highest(group):
    agree(
        group,
        highest(group, group.rank) == group.size - 1
        and highest(group, 2 if group.rank == 0 else 0) == 2,
    )
