"""``elastic.run`` without a death, on any MPI: its arguments, and what it refuses on all ranks."""

import pytest

import mpidist.comm
from mpidist import elastic
from mpidist.comm.mpi import library
from mpidist.errors import DisagreementError, GroupError, LaunchError
from tests.soak.counts import Counts
from tests.tools.support import agree, raises_on_all


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"train": 3}, TypeError, "needs functions as train and warm"),
        ({"warm": "model"}, TypeError, "needs functions as train and warm"),
        ({"min_ranks": 0}, ValueError, "min_ranks of at least 1"),
        ({"min_ranks": True}, TypeError, "a whole number as min_ranks"),
        ({"max_failures": -1}, ValueError, "max_failures of at least 0"),
        ({"max_failures": 1.0}, TypeError, "a whole number as max_failures"),
        ({"timeout_s": 0}, ValueError, "timeout_s above 0"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        elastic.run(**{"train": list, **arguments})


@pytest.mark.mpi
def test_what_all_ranks_refuse(group, monkeypatch):
    """The group of the test is open, and its world is that of all ranks."""

    def call(**arguments):
        return lambda: elastic.run(list, **arguments)

    raises_on_all(group, GroupError, call(), "was called while groups of its job are open (group")
    # The following checks are behind the first one.
    monkeypatch.setattr("mpidist.comm.mpi.runtime.uses_of_world", list)
    monkeypatch.setattr("mpidist.comm.mpi.runtime.leave_world", lambda: None)
    monkeypatch.setenv("MPIDIST_SPARES", "1")
    if not library.has_ulfm():
        raises_on_all(group, LaunchError, call(), "take no rank's place without ULFM")
    monkeypatch.setattr("mpidist.elastic.job.has_ulfm", lambda: True)
    monkeypatch.setenv("MPIDIST_SPARES", str(group.size // 2 + 1))
    raises_on_all(group, LaunchError, call(), "at most as many spares as ranks")
    if group.rank == group.size - 1:
        monkeypatch.setenv("MPIDIST_SPARES", "some")
    raises_on_all(group, LaunchError, call(), "MPIDIST_SPARES is")
    monkeypatch.delenv("MPIDIST_SPARES")
    if group.size > 1:
        words = "the same min_ranks on all processes"
        raises_on_all(group, DisagreementError, call(min_ranks=1 + group.rank % 2), words)


@pytest.mark.mpi
def test_without_ulfm_the_training_runs_once(group, monkeypatch):
    monkeypatch.setattr("mpidist.comm.mpi.runtime.uses_of_world", list)
    monkeypatch.setattr("mpidist.comm.mpi.runtime.leave_world", lambda: None)
    monkeypatch.setattr("mpidist.elastic.job.has_ulfm", lambda: False)
    calls = []

    def train():
        calls.append(mpidist.comm.init().size)
        return "result"

    counts = Counts()
    before = counts().get("communicators")
    found = elastic.run(train, min_ranks=1, max_failures=0)
    agree(group, (found, calls) == ("result", [group.size]), f"{found} {calls}")
    agree(group, counts().get("communicators") == before, "a communicator is left")

    def fails():
        raise KeyError("of the program")

    raises_on_all(group, KeyError, lambda: elastic.run(fails), "of the program")


@pytest.mark.mpi
def test_a_training_is_not_begun_within_another_one(group, monkeypatch):
    monkeypatch.setattr("mpidist.comm.mpi.runtime.uses_of_world", list)
    monkeypatch.setattr("mpidist.comm.mpi.runtime.leave_world", lambda: None)
    monkeypatch.setattr("mpidist.elastic.job.has_ulfm", lambda: False)
    within = lambda: elastic.run(lambda: elastic.run(list))  # noqa: E731
    raises_on_all(group, GroupError, within, "called within a train of run")
    agree(group, elastic.run(lambda: 3) == 3)
