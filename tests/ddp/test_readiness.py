"""Buckets become ready in the order of the plan; against a brute-force twin."""

import itertools
import random

import pytest

from mpidist.ddp.buckets.settings import Settings
from mpidist.ddp.readiness import ParameterUsage, Readiness

NAMES = ["a", "b", "c"]
LIMITS = (40,)


def launched(buckets, expected, skipped, order):
    """Return after each addition the launched buckets: the plan's longest complete beginning."""
    counts, launches = [0] * len(expected), []
    for place in order:
        counts[place] += 1
        gone = []
        for index, places in enumerate(buckets):
            if index in skipped:
                continue
            if any(counts[p] < expected[p] for p in places):
                break
            gone.append(index)
        launches.append(gone)
    return launches


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_plan_order(order):
    buckets = [(3, 2), (0,), (1,)]
    readiness = Readiness(buckets, [1] * 4)
    gone = []
    for place, expected in zip(order, launched(buckets, [1] * 4, (), order), strict=True):
        assert readiness.mark_ready(place) == 0
        gone += readiness.pop_ready()
        assert gone == expected
    assert gone == [0, 1, 2] and readiness.pop_rest() == []
    assert readiness.ready_order == list(order)


def test_random_plans_against_the_twin():
    random.seed(0)
    for _ in range(300):
        count = random.randint(1, 12)
        places = random.sample(range(count), count)
        cuts = sorted(random.sample(range(1, count), random.randint(0, count - 1)))
        buckets = [tuple(places[a:b]) for a, b in itertools.pairwise([0, *cuts, count])]
        expected = [random.randint(0, 3) for _ in range(count)]
        unused = [
            index for index, bucket in enumerate(buckets) if not any(expected[p] for p in bucket)
        ]
        skipped = frozenset(random.sample(unused, random.randint(0, len(unused))))
        order = [place for place, times in enumerate(expected) for _ in range(times)]
        random.shuffle(order)
        readiness, gone = Readiness(buckets, expected, skipped), []
        for place, wanted in zip(order, launched(buckets, expected, skipped, order), strict=True):
            readiness.mark_ready(place)
            if readiness.counts[place] == expected[place]:
                gone += readiness.pop_ready()
                assert gone == wanted
        gone += readiness.pop_rest()
        assert gone == [index for index in range(len(buckets)) if index not in skipped]
        assert [readiness.is_last(index) for index in gone] == [False] * (len(gone) - 1) + [
            True
        ] * bool(gone)


def test_surplus_additions_are_negative():
    readiness = Readiness([(0,), (1,)], [2, 0])
    assert [readiness.mark_ready(0) for _ in range(3)] == [1, 0, -1]
    assert readiness.mark_ready(1) == -1


def test_unknown_times_hold_everything_back():
    readiness = Readiness([(0, 1)], None)
    assert (
        readiness.mark_ready(1) > 0 and readiness.mark_ready(0) > 0 and readiness.mark_ready(1) > 0
    )
    assert readiness.pop_ready() == [] and readiness.pop_rest() == [0]
    assert readiness.counts == [1, 2] and readiness.ready_order == [1, 0]


def test_one_addition_is_expected_unless_the_graph_is_static():
    usage = ParameterUsage(NAMES, Settings(LIMITS))
    usage.record_additions([2, 2, 2])
    assert usage.expected == [1, 1, 1] and usage.skipped([(0, 1), (2,)]) == frozenset()
    assert "arrived twice" in usage.surplus_error(0, 2)
    static = ParameterUsage(NAMES, Settings(LIMITS, static_graph=True))
    assert static.expected is None
    static.record_additions([2, 0, 1])
    static.record_additions([1, 1, 1])
    assert static.expected == [2, 0, 1]
    assert "'a' arrived 3 times" in static.surplus_error(0, 3)
    assert "2 times in the first" in static.surplus_error(0, 3)


def test_buckets_wait_for_the_end_where_modules_communicate():
    settings = Settings(LIMITS, static_graph=True, communicates_in_backward=True)
    usage = ParameterUsage(NAMES, settings)
    usage.record_additions([1, 1, 1])
    assert usage.expected is None
    alike = ParameterUsage(NAMES, Settings(LIMITS, communicates_in_backward=True))
    assert alike.expected == [1, 1, 1]


def test_parameters_that_no_rank_used_are_skipped():
    settings = Settings(LIMITS, find_unused_parameters=True, skip_unused=True)
    usage = ParameterUsage(NAMES, settings)
    usage.record_used([True, False, False])
    usage.record_used([True, True, True])
    assert usage.expected == [1, 0, 0] and usage.skipped([(0,), (1, 2)]) == {1}
    assert usage.skipped([(0, 1), (2,)]) == {1}
    assert "no rank used it in the first" in usage.surplus_error(1, 1)
    assert "arrived twice" in usage.surplus_error(0, 2)
    kept = ParameterUsage(NAMES, Settings(LIMITS, find_unused_parameters=True))
    kept.record_used([True, False, False])
    assert kept.expected == [1, 1, 1] and kept.skipped([(0,), (1, 2)]) == frozenset()
