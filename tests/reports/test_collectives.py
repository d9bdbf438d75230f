"""Collectives of recordings: ranks that have not come, and the first difference."""

from dataclasses import replace

import pytest

from mpidist.comm.recorder.recording import Kind
from mpidist.reports import collectives
from tests.reports.made import collective, entry, recording


def recordings(*entries):
    return {rank: recording(rank, each, len(entries)) for rank, each in enumerate(entries)}


def test_a_rank_that_has_not_come_is_missing():
    made = recordings(
        [collective(1, 1, 2), collective(2, 3)],
        [collective(1, 1, 2)],
        [collective(1, 1, 2), collective(2, 4)],
    )
    (late,) = collectives.late(made)
    assert (late.sequence, sorted(late.inside), late.missing, late.unknown) == (2, [0, 2], (1,), ())
    del made[1]
    (late,) = collectives.late(made)
    assert (late.missing, late.unknown) == ((), (1,))


def test_ranks_of_another_group_are_not_missing():
    made = recordings([collective(1, 1, group="pair")], [], [])
    made[0].groups["pair"] = (0, 1)
    (late,) = collectives.late(made)
    assert late.missing == (1,)


def test_a_rank_whose_recording_holds_only_later_entries_may_have_come():
    """Rank 1 left a collective early, and its ring has come around since."""
    made = recordings([collective(1, 1)], [entry(9, Kind.STEP, "SGD", 2, end_s=3)], [])
    made[1] = replace(made[1], overwritten=8, oldest=9)
    (late,) = collectives.late(made)
    assert (late.missing, late.forgotten) == ((2,), (1,))
    # An entry of the group that the ring holds tells that none has followed.
    made[0].entries[:] = [collective(9, 1)]
    made[1].entries[:] = [replace(collective(8, 1, 2), number=9)]
    (late,) = collectives.late(made)
    assert (late.missing, late.forgotten) == ((1, 2), ())
    # One that is kept because it is under way may have issued others since.
    made[1].entries[:] = [collective(7, 1, operation="two_stages"), made[1].entries[0]]
    made[1] = replace(made[1], oldest=100)
    late = collectives.late(made)
    assert {(one.sequence, one.missing, one.forgotten) for one in late} == {
        (7, (2,), ()), (9, (2,), (1,)),
    }  # fmt: skip


def test_a_group_is_known_by_its_key_whatever_its_label():
    made = recordings([collective(1, 1)], [collective(1, 1, group="world#2", shape=(6,))])
    made[1].keys.update({"world#2": "key", "world": "other"})
    (late,) = collectives.late(made)
    assert late.missing == () and len(late.inside) == 2
    assert len(collectives.differences(made)) == 1


def test_a_rank_that_has_gone_on_is_not_missing():
    made = recordings([collective(1, 1)], [collective(1, 1, 2), collective(2, 3)])
    late = collectives.late(made)
    assert [(one.sequence, one.missing) for one in late] == [(2, (0,)), (1, ())]


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (
            [dict(shape=(5,)), dict(shape=(6,)), dict(shape=(5,))],
            [((1,), "all_reduce (6,) float32"), ((0, 2), "all_reduce (5,) float32")],
        ),
        (
            [dict(), dict(dtype="float64"), dict()],
            [((1,), "all_reduce (5,) float64"), ((0, 2), "all_reduce (5,) float32")],
        ),
        (
            [dict(), dict(operation="broadcast")],
            [((1,), "broadcast"), ((0,), "all_reduce")],
        ),
        ([dict(shape=(4,)), dict(shape=(2, 2))], None),
        ([dict(operation="gather"), dict(operation="gather", shape=(6,))], None),
        ([dict(operation="barrier", dtype="", shape=()) for _ in range(2)], None),
    ],
)
def test_the_first_different_call_is_named(calls, said):
    made = recordings(
        *([collective(1, 1, 2), collective(2, 3, **each), collective(3, 4)] for each in calls)
    )
    found = collectives.differences(made)
    if said is None:
        assert found == []
        return
    (difference,) = found
    assert difference.sequence == 2 and not difference.is_order
    assert collectives.sentence(difference) == said


def test_an_order_that_differs_is_told_from_other_calls():
    two = ["all_reduce", "broadcast"]
    made = recordings(
        [collective(number, number, operation=name) for number, name in enumerate(two, 1)],
        [collective(number, number, operation=name) for number, name in enumerate(two[::-1], 1)],
    )
    (difference,) = collectives.differences(made)
    assert difference.sequence == 1 and difference.is_order


@pytest.mark.parametrize(("following", "is_order"), [("all_reduce", True), ("barrier", False)])
def test_a_rank_alone_that_has_gone_on_to_a_third_call_has_no_other_order(following, is_order):
    waits = [collective(1, 1, operation="all_reduce")]
    goes_on = [collective(1, 1, 2, operation="broadcast"), collective(2, 3, operation=following)]
    (difference,) = collectives.differences(recordings(waits, goes_on, waits))
    assert difference.is_order is is_order
