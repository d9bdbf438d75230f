"""Errors of MPI calls: which are a rank's death. Whole jobs are in comm/watchdog."""

import pytest

from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI


def test_a_death_alone_is_tolerated(monkeypatch):
    monkeypatch.setattr(mpi_errors, "is_failure", lambda error: error.Get_error_code() == 1)
    monkeypatch.setattr(mpi_errors, "is_mpi_error", lambda error: isinstance(error, MPI.Exception))
    with mpi_errors.death_tolerated():
        raise MPI.Exception(1)
    with pytest.raises(MPI.Exception), mpi_errors.death_tolerated():
        raise MPI.Exception(2)
    with pytest.raises(KeyError), mpi_errors.death_tolerated():
        raise KeyError("another error")
