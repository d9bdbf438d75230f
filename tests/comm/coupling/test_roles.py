"""Plan of a coupled job: the program of each process, and who serves whom."""

import re

import pytest

from mpidist.comm.coupling import roles


def test_processes_follow_each_other_by_program():
    assert roles.numbers({"a": 2, "b": 1, "c": 3}, 6) == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ({"a": 2, "b": 1}, "2 for 'a' + 1 for 'b' processes for a job of 4"),
        ({"a": 4, "b": 0}, "at least one process for each program; got 0 for 'b'"),
        ({"a": 2, "b": 2.0}, "got 2.0 for 'b'"),
        ({"a": True, "b": 3}, "got True for 'a'"),
    ],
)
def test_numbers_that_are_not_the_jobs_are_refused(groups, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        roles.numbers(groups, 4)


@pytest.mark.parametrize("names", [["a"], [], ["a", "a"], ["a", ""]])
def test_names_must_be_different(names):
    with pytest.raises(ValueError, match="different names of two programs"):
        roles.require_names(names)
    with pytest.raises(TypeError, match="got 3"):
        roles.require_names(["a", 3])


def test_each_name_has_a_program():
    roles.require_programs(["a", "b"], [0, 1, 1])
    for found in ([0, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match="MPI_APPNUM"):
            roles.require_programs(["a", "b"], found)


@pytest.mark.parametrize("here", range(1, 7))
@pytest.mark.parametrize("there", range(1, 7))
def test_partners_are_mutual_and_even(here, there):
    ours = [roles.partners(rank, here, there) for rank in range(here)]
    theirs = [roles.partners(rank, there, here) for rank in range(there)]
    for rank, others in enumerate(ours):
        assert others and all(rank in theirs[other] for other in others)
    counts = [len(others) for others in ours]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == max(here, there)
