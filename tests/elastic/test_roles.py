"""Roles after deaths, against a naive twin, and the limits of a job."""

import itertools

import pytest

from mpidist.elastic.roles import DEAD, SPARE, Limits, at_start, number_of_spares, plan
from mpidist.errors import LaunchError


def _naive(former, living):
    """Return the roles by process: one lost rank after the other."""
    roles = {process: role for process, role in enumerate(former) if process in living}
    for lost in sorted(role for role in former if role >= 0 and role not in roles.values()):
        spare = next((process for process, role in roles.items() if role == SPARE), None)
        if spare is not None:
            roles[spare] = lost
    ranks = sorted((process for process in roles if roles[process] >= 0), key=roles.get)
    return [
        ranks.index(process) if process in ranks else roles.get(process, DEAD)
        for process in range(len(former))
    ]


@pytest.mark.parametrize(("processes", "spares"), [(1, 0), (3, 0), (4, 1), (5, 2), (6, 3)])
def test_every_set_of_deaths_and_a_second_one(processes, spares):
    everyone = range(processes)
    start = at_start(processes, spares)
    assert start == (*range(processes - spares), *[SPARE] * spares)
    sets = [
        set(some)
        for size in everyone
        for some in itertools.combinations(everyone, processes - size)
    ]
    for first in sets:
        once = plan(start, first, Limits())
        assert list(once.roles) == _naive(start, first)
        assert once.size == min(processes - spares, len(first))
        assert sorted(role for role in once.roles if role >= 0) == list(range(once.size))
        assert once.spares == max(0, len(first) - (processes - spares))
        assert once.filled == once.lost[: len(once.filled)] and not once.refusal
        for second in sets:
            if second <= first:
                assert list(plan(once.roles, second, Limits()).roles) == _naive(once.roles, second)


@pytest.mark.parametrize(
    ("living", "limits", "words"),
    [
        ({0, 1, 3}, Limits(3, 1), ""),
        ({0, 3}, Limits(3), "2 of its 4 processes have died, and 2 of at least 3 ranks are left"),
        (
            {0, 1, 2},
            Limits(3, 0),
            "1 of its 4 processes have died, more than the 0 of max_failures",
        ),
        ({0}, Limits(1, 3), ""),
        ({0, 1, 2, 3}, Limits(3, 0), ""),
    ],
)
def test_what_ends_the_job(living, limits, words):
    assert words in (refusal := plan(at_start(4, 1), living, limits).refusal)
    assert bool(words) == bool(refusal)


@pytest.mark.parametrize(
    ("living", "words"),
    [
        ({0, 2, 3, 4}, "a spare takes the place of rank 1"),
        ({0, 3, 4}, "spares take the place of ranks 1, 2"),
        ({0, 3}, "a spare takes the place of rank 1, 2 ranks go on"),
        ({0, 1}, "2 ranks go on"),
        ({0, 1, 2, 4}, ""),
    ],
)
def test_what_is_told(living, words):
    assert plan(at_start(5, 2), living, Limits()).described() == words


def test_number_of_spares():
    assert number_of_spares({}) == 0 and number_of_spares({"MPIDIST_SPARES": "2"}) == 2
    for text in ("-1", "two", ""):
        with pytest.raises(LaunchError, match="MPIDIST_SPARES is the number of spare processes"):
            number_of_spares({"MPIDIST_SPARES": text})
