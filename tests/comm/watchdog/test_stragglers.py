"""Stragglers of made arrivals; pure."""

import pytest

from mpidist.comm.watchdog.stragglers import (
    found,
    interval_of,
    lateness,
    sentence,
    step_of,
)


def arrivals(count, late, size=4, every=1):
    """Return arrivals at collectives; rank 2 comes ``late`` ns after the others at each n-th."""
    return [
        {rank: 10 * rank + late * (rank == 2 and number % every == 0) for rank in range(size)}
        for number in range(count)
    ]


def test_lateness_is_after_the_middle_rank():
    assert lateness({0: 5, 1: 100, 2: 7}) == {0: -2, 1: 93, 2: 0}
    assert lateness({0: 5, 1: 100}) == {0: 0, 1: 95}


def test_rank_that_is_always_late_is_found():
    (one,) = found(arrivals(20, 60), 1000)
    assert one.rank == 2 and one.share == 1.0 and one.collectives == 20 and one.late_ns == 70
    assert "rank 2 on node7 is late at 100% of 20" in sentence(one, "world", "node7", 1000)


@pytest.mark.parametrize(
    ("collectives", "step_ns"),
    [
        (arrivals(20, 60), None),  # the step is not known
        (arrivals(20, 60), 1400),  # 5 % of the step
        (arrivals(9, 60), 1000),  # too few
        (arrivals(20, 60, every=2), 1000),  # half of them
        (arrivals(20, 0), 1000),
        ([{0: 80 * (n % 2), 1: 80 * (n % 2 == 0)} for n in range(20)], 1000),  # in turns
    ],
)
def test_others_are_not(collectives, step_ns):
    assert found(collectives, step_ns) == []


def test_both_ranks_of_a_slow_node_are_found():
    slow = [{0: 0, 1: 1, 2: 90 + n % 2, 3: 91 - n % 2} for n in range(20)]
    assert {one.rank for one in found(slow, 1000)} == {2, 3}


def test_nine_of_ten_are_enough():
    rare = [{0: 0, 1: 100 * (n % 10 != 0), 2: 0} for n in range(20)]
    assert [one.rank for one in found(rare, 1000)] == [1]


def test_step_is_the_period_of_the_operations():
    operations = ["warm", "up", *"abc" * 10]
    begins = [0, 1, *(10 * n for n in range(30))]
    assert step_of(operations, begins) == 30
    # An evaluation between two steps.
    assert step_of([*"abc" * 10, "x", *"abc" * 10], range(0, 610, 10)) == 30
    assert step_of("a" * 20, range(0, 200, 10)) == 10
    assert step_of("abcdefghijklmno", range(15)) is None
    assert step_of("ab", range(2)) is None


def test_interval_is_the_median():
    assert interval_of([0, 10, 20, 100]) == 10
    assert interval_of([0, 10]) is None
