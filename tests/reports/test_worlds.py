"""Worlds of a job: which recordings stand side by side, and which are of the past."""

import os

from mpidist.reports import worlds
from tests.reports.made import S, recording

A_SECOND = os.sysconf("SC_CLK_TCK")


def found(*recordings, dead=()):
    """Return the places of each world's recordings by rank, and the lines on the past."""
    current, past = worlds.of(recordings, lambda each: each.pid not in dead)
    return [{rank: each.pid for rank, each in one.items()} for one in current.values()], past


def test_a_dead_process_stands_in_the_world_in_which_the_others_are_still():
    ranks = [recording(rank, [], pid=rank, worlds=("a",)) for rank in range(3)]
    assert found(*ranks, dead=[1]) == ([{0: 0, 1: 1, 2: 2}], [])


def test_a_dead_process_is_past_when_the_others_have_entered_another_world():
    dead = recording(1, [], pid=1, worlds=("a",))
    others = [recording(0, [], 2, pid=0, worlds=("a", "b"))]
    others += [recording(1, [], 2, pid=2, worlds=("a", "b"))]
    past = ["rank 1 of 3, of an earlier world of the job"]
    for recordings in ([others[0], dead, others[1]], [*others, dead]):
        assert found(*recordings, dead=[1]) == ([{0: 0, 1: 2}], past)
        # Also when the job has ended.
        assert found(*recordings, dead=[0, 1, 2]) == ([{0: 0, 1: 2}], past)


def test_a_living_process_that_stays_behind_is_not_past():
    stays = recording(1, [], pid=1, worlds=("a",))
    goes = recording(0, [], 1, pid=0, worlds=("a", "b"))
    assert found(goes, stays) == ([{0: 0}, {1: 1}], [])


def test_a_program_that_has_died_is_shown_beside_the_one_that_waits_for_it():
    ranks = [recording(0, [], 1, pid=pid, worlds=("a", name)) for pid, name in enumerate("bc")]
    assert found(*ranks, dead=[1]) == ([{0: 0}, {0: 1}], [])


def test_a_world_that_ended_before_a_process_of_the_job_began_is_of_an_earlier_start():
    before = recording(2, [], pid=2, worlds=("a",), started_monotonic_ns=9 * S)
    now = recording(
        0, [], 2, pid=0, worlds=("b",), started_ticks=10 * A_SECOND, started_monotonic_ns=12 * S
    )
    assert found(now, before, dead=[2]) == ([{0: 0}], ["rank 2 of 3, of an earlier start"])
    beside = recording(0, [], 2, pid=2, worlds=("a",), started_monotonic_ns=11 * S)
    assert found(now, beside, dead=[2]) == ([{0: 0}, {0: 2}], [])
    # Ticks count while a node is suspended, its monotonic clock does not.
    late = recording(
        0, [], 2, pid=0, worlds=("b",), started_ticks=99 * A_SECOND, started_monotonic_ns=11 * S
    )
    assert found(late, beside, dead=[0, 2]) == ([{0: 0}, {0: 2}], [])
