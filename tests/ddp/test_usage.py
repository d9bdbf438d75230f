"""Expected additions, skipped buckets and surplus errors, from the counts of earlier passes."""

from mpidist.ddp.layout import Settings
from mpidist.ddp.usage import ParameterUsage

NAMES = ["a", "b", "c"]
LIMITS = (40,)


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
