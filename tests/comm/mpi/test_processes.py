"""Processes of the job, as far as they need no ULFM; deaths are in elastic/test_recovery.py."""

import pytest

from mpidist.comm.mpi import library, mpi_errors, processes
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.processes import Agreement
from mpidist.errors import RankFailureError
from tests.tools.support import agree


@pytest.mark.mpi
def test_rows_and_splits(group):
    everyone = processes.all_processes(30.0)
    agree(group, (everyone.rank, everyone.size) == (group.rank, group.size))
    rows = everyone.gather([group.rank, -7, 1 << 40])
    agree(group, rows == [[rank, -7, 1 << 40] for rank in range(group.size)], str(rows))
    # All but the last one, in the opposite order.
    last = group.size - 1
    made = everyone.split(None if group.rank == last else last - group.rank)
    agree(group, (made is None) == (group.rank == last))
    if made is not None:
        assert (made.Get_rank(), made.Get_size()) == (last - 1 - group.rank, last)
        made.Free()


@pytest.mark.mpi
def test_agreements(group):
    if "Open MPI" not in library.library_name():
        pytest.skip("agreements need Open MPI")
    everyone = processes.all_processes(30.0)
    last = group.rank == group.size - 1
    for is_done, status, expected in (
        (True, None, Agreement(True)),
        (not last, None, Agreement(False)),
        (True, 75 if last else None, Agreement(True, 75)),
        (True, 255, Agreement(True, 255)),
        (not last, 0, Agreement(False, 0)),
    ):
        found = everyone.agree(is_done, 1e-3, status)
        agree(group, found == expected, f"{found}, expected {expected}")


@pytest.mark.mpi
def test_errors_that_may_come_of_a_death(group, monkeypatch):
    everyone = processes.all_processes(30.0)
    revoked = [MPI.Exception(MPI.ERR_REVOKED)] if MPI.ERR_REVOKED != MPI.ERR_UNKNOWN else []
    for error in (RankFailureError("it"), *revoked):
        assert everyone.is_of_death(error, 0.0)
    own = KeyError("of the program")
    assert not everyone.is_of_death(own, 0.0)
    looks = iter([None, (), (), (2,)])
    monkeypatch.setattr(mpi_errors, "known_dead", lambda *args: next(looks))
    assert everyone.is_of_death(own, 20.0)
