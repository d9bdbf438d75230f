"""Processes of the job, as far as they need no ULFM; deaths are in elastic/test_recovery.py."""

import pytest

from mpidist.comm.mpi import processes
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
