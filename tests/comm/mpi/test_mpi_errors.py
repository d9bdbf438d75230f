"""Errors of MPI calls: which are a rank's death. Whole jobs are in comm/watchdog."""

from types import SimpleNamespace

import pytest

from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.errors import MpidistError

DEATH, OTHER = 901, 902


class Error(Exception):
    """What the functions read of mpi4py's exception."""

    def __init__(self, kind, text="words"):
        self.kind, self.text = kind, text

    def Get_error_class(self):
        return self.kind

    def Get_error_string(self):
        return self.text


@pytest.fixture(autouse=True)
def _ulfm(monkeypatch):
    """Make these the classes and the exceptions of a library with ULFM."""
    monkeypatch.setattr(MPI, "ERR_PROC_FAILED", DEATH, raising=False)
    monkeypatch.setattr(mpi_errors, "is_mpi_error", lambda error: isinstance(error, Error))


def raising(error):
    def call(*arguments):
        raise error

    return call


def test_the_cause_of_a_truncated_message_stands_before_the_calls_of_mpich():
    stack = "Message truncated, error stack:\nMPIR_Allreduce(4817).............: "
    text = str(mpi_errors.translate(Error(OTHER, stack), "rank 0 of 2: all_reduce"))
    assert text.startswith(
        "rank 0 of 2: all_reduce: Message truncated; the ranks' tensors differ in size, or they"
    )
    assert "MPIR" not in text
    other = "Other MPI error, error stack:\nMPID_Isend(12): no such host"
    assert str(mpi_errors.translate(Error(OTHER, other), "it")) == f"it: {other}"


def test_the_classes_of_a_failure():
    assert mpi_errors.is_failure(Error(DEATH)) and not mpi_errors.is_failure(Error(OTHER))
    # Without ULFM mpi4py gives all of them this value.
    assert not mpi_errors.is_failure(Error(MPI.ERR_UNKNOWN))


@pytest.mark.parametrize("error", [Error(OTHER), KeyError("another error")])
def test_a_death_alone_is_tolerated(error):
    with mpi_errors.death_tolerated():
        raise Error(DEATH)
    with pytest.raises(type(error)), mpi_errors.death_tolerated():
        raise error


@pytest.mark.parametrize("error", [Error(OTHER), KeyError("another error")])
def test_a_request_of_a_dead_peer_is_over(error):
    assert mpi_errors.is_over(SimpleNamespace(Test=lambda: 1)) is True
    assert mpi_errors.is_over(SimpleNamespace(Test=lambda: 0)) is False
    assert mpi_errors.is_over(SimpleNamespace(Test=raising(Error(DEATH))))
    assert mpi_errors.is_over(SimpleNamespace(Test=raising(MpidistError("its own"))))
    with pytest.raises(type(error)):
        mpi_errors.is_over(SimpleNamespace(Test=raising(error)))


@pytest.mark.parametrize("error", [Error(OTHER), KeyError("another error")])
def test_a_probe_acknowledges_a_death_and_nothing_else(error):
    acknowledged = []

    def communicator(probe):
        return SimpleNamespace(Improbe=probe, Ack_failed=lambda: acknowledged.append(1))

    found = mpi_errors.matched_probe(communicator(lambda *what: ("a message", what[1])), 7, None)
    assert found == ("a message", 7) and not acknowledged
    assert mpi_errors.matched_probe(communicator(raising(Error(DEATH))), 7, None) is None
    assert acknowledged == [1]
    with pytest.raises(type(error)):
        mpi_errors.matched_probe(communicator(raising(error)), 7, None)
    assert acknowledged == [1]


def test_mpi_hears_of_a_death_as_it_is_asked(monkeypatch):
    """A death is known after as many calls as Open MPI makes between two looks for events."""
    calls = []
    own = SimpleNamespace(Iprobe=lambda *arguments: calls.append(arguments))
    library = SimpleNamespace(COMM_SELF=own, ANY_SOURCE=-1, ANY_TAG=-1)
    monkeypatch.setattr(mpi_errors, "MPI", library)
    monkeypatch.setattr(mpi_errors, "_failed_places", lambda mpi: (1,) if len(calls) >= 8 else ())
    assert mpi_errors.known_dead(None, (4, 5)) == (5,)
