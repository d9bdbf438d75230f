"""Schedule of outer steps, by hand and against what it promises of any module."""

import random

import pytest

from mpidist.ddp.outer_schedule import OuterSchedule, even_runs, runs_of


def test_averages_begin_evenly_and_last_at_every():
    def steps(**settings):
        return [step for step in range(1, 21) if OuterSchedule(**settings).begins(step)]

    assert steps(every=10) == [10, 20]
    assert steps(every=1) == list(range(1, 21))
    assert steps(every=10, fragments=2, overlap=3) == [5, 10, 15, 20]
    assert steps(every=10, fragments=3) == [3, 6, 10, 13, 16, 20]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"every": 0}, ValueError),
        ({"every": 1.5}, TypeError),
        ({"every": 4, "fragments": 0}, ValueError),
        ({"every": 4, "fragments": 5}, ValueError),
        ({"every": 4, "overlap": 4}, ValueError),
        ({"every": 4, "overlap": -1}, ValueError),
    ],
)
def test_wrong_numbers_are_refused(settings, error):
    with pytest.raises(error):
        OuterSchedule(**settings)


def test_runs_hold_each_parameter_once_in_order_and_are_even():
    assert even_runs([10] * 8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert even_runs([100, 1, 1, 1], 4) == [[0], [1], [2], [3]]
    assert even_runs([1, 1, 1, 100], 2) == [[0, 1, 2], [3]]
    rng = random.Random(0)
    for _ in range(500):
        count = rng.randint(1, 9)
        numels = [rng.choice([0, 1, 1000, rng.randint(0, 50)]) for _ in range(count)]
        runs = even_runs(numels, rng.randint(1, count))
        assert all(runs) and [place for run in runs for place in run] == list(range(count))
    with pytest.raises(ValueError, match="at most the number of parameters"):
        even_runs([1, 2], 3)


def test_runs_of_given_members():
    a, b, c, frozen = object(), object(), object(), object()
    assert runs_of([[c, frozen], [a, b, a]], [a, b, c]) == [[2], [0, 1]]
    for members in ([[a], [b]], [[a, b, c], [c]], [[a, b, c], [frozen]]):
        with pytest.raises(ValueError, match="exactly one"):
            runs_of(members, [a, b, c])
