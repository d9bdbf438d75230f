"""Plan of ``make gpu``: order, budget, reserve of the benchmarks, and what is left out."""

import random
from dataclasses import dataclass

import pytest

from tests.gpu import plan, record
from tests.gpu.plan import BENCHMARKS, FAILED, NEVER, OK, SANITIZERS, TESTS, TIMED_OUT, Past

ORDER = ["first", "aware:*", "bench-*"]


@dataclass(frozen=True)
class Named:
    name: str
    phase: str = TESTS


def planned(names, past, budget_s=1000.0, lanes=1):
    steps = [one if isinstance(one, Named) else Named(one) for one in names]
    return plan.plan(steps, past, ORDER, budget_s, lanes)


def names(steps):
    return [step.name for step in steps]


def test_what_never_ran_or_failed_comes_first():
    past = {
        "passed": Past(OK, 1, 4),
        "first": Past(OK, 1, 4),
        "passed long ago": Past(OK, 1, 2),
        "aware:failed": Past(FAILED, 1, 4),
        "hung": Past(TIMED_OUT, 1, 4),
        "aware:estimated": Past(NEVER, 1, 0),
    }
    found = planned(["passed", "first", "passed long ago", "new", *sorted(past)[:2], "hung"], past)
    assert names(found.chosen[TESTS]) == [
        *("aware:estimated", "new", "aware:failed", "hung"),
        *("passed long ago", "first", "passed"),
    ]


def test_what_does_not_fit_is_left_out_and_later_fits_first():
    past = {name: Past(OK, 40, 1) for name in "abc"}
    found = planned("abc", past, 100)
    assert names(found.chosen[TESTS]) == ["a", "b"] and names(found.left_out) == ["c"]
    ran = {name: record.updated(past[name], OK, 40, 2) for name in "ab"}
    found = planned("abc", past | ran, 100)
    assert names(found.chosen[TESTS]) == ["c", "a"] and names(found.left_out) == ["b"]


def test_a_shorter_step_takes_the_time_that_a_longer_one_does_not_fit():
    past = {"a": Past(OK, 10, 1), "b": Past(OK, 500, 1), "c": Past(OK, 10, 1)}
    found = planned("abc", past, 100)
    assert names(found.chosen[TESTS]) == ["a", "c"] and names(found.left_out) == ["b"]


def test_benchmarks_keep_a_third():
    tests = [Named(f"new {index}") for index in range(50)]
    benchmarks = [Named(f"bench-{index}", BENCHMARKS) for index in range(5)]
    past = {step.name: Past(OK, 25, 1) for step in benchmarks}
    found = planned([*tests, *benchmarks], past, 300)
    assert len(found.chosen[BENCHMARKS]) == 3  # of 30 s each, with the margin
    assert found.seconds[BENCHMARKS] == pytest.approx(90)
    assert 180 < found.seconds[TESTS] <= 210
    # Without tests that need it, they have all.
    assert len(planned(benchmarks, past, 300).chosen[BENCHMARKS]) == 5


def test_sanitizers_are_planned_by_the_same_order():
    past = {"test": Past(OK, 80, 1), "memcheck": Past(NEVER, 80, 0)}
    found = planned(["test", Named("memcheck", SANITIZERS)], past, 100)
    assert names(found.chosen[SANITIZERS]) == ["memcheck"] and names(found.left_out) == ["test"]


def test_two_lanes_hold_twice_as_much_but_for_benchmarks():
    past = {name: Past(OK, 50, 1) for name in "abcd"}
    assert names(planned("abcd", past, 130).left_out) == ["c", "d"]
    assert not planned("abcd", past, 130, lanes=2).left_out
    alone = [Named(name, BENCHMARKS) for name in "abcd"]
    assert len(planned(alone, past, 130, lanes=2).chosen[BENCHMARKS]) == 2


def test_length_is_that_of_the_longest_lane():
    assert plan.length_s([], 2) == 0
    assert plan.length_s([3, 1, 1, 1], 1) == 6
    assert plan.length_s([3, 1, 1, 1], 2) == 3
    assert plan.length_s([1, 1, 3], 2) == 4


@pytest.mark.parametrize("seed", range(20))
def test_each_step_has_its_place_and_the_budget_is_kept(seed):
    draw = random.Random(seed)
    steps = [Named(f"step {index}", draw.choice(plan.PHASES)) for index in range(60)]
    past = {
        step.name: Past(draw.choice([NEVER, OK, FAILED]), draw.uniform(0, 60), draw.randrange(4))
        for step in steps
        if draw.random() < 0.8
    }
    budget_s, lanes = draw.uniform(0, 900), draw.choice([1, 2])
    found = plan.plan(steps, past, ORDER, budget_s, lanes)
    chosen = [step for phase in plan.PHASES for step in found.chosen[phase]]
    assert sorted(names([*chosen, *found.left_out])) == sorted(names(steps))
    for phase in plan.PHASES:
        keys = [plan.priority(step.name, past, ORDER) for step in found.chosen[phase]]
        assert keys == sorted(keys)
        seconds = [past.get(step.name, Past()).expected_s for step in found.chosen[phase]]
        own_s = plan.length_s(seconds, plan.lanes_of(phase, lanes))
        assert found.seconds[phase] == pytest.approx(own_s)
    assert sum(found.seconds.values()) <= budget_s


def test_the_following_step_is_the_first_that_ends_in_time():
    past = {"a": Past(OK, 100, 1), "b": Past(OK, 10, 1)}
    steps = [Named("a"), Named("b")]
    assert plan.following(steps, past, 1000) is steps[0]
    assert plan.following(steps, past, 50) is steps[1]
    assert plan.following(steps, past, 5) is None
