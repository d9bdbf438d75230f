"""The world's numbers of nodes, and the name of a world of some ranks."""

import pytest

from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.world import check_start, join, number_alike
from tests.tools.support import agree


def test_nodes_are_numbered_in_the_order_of_their_first_ranks():
    assert tuple(number_alike(["b", "a", "b", "c", "a"])) == (0, 1, 0, 2, 1)
    assert tuple(number_alike([])) == ()


@pytest.mark.mpi(min_size=2)
def test_a_world_of_some_ranks_is_named_by_its_first(world):
    whole = MPI.COMM_WORLD
    part = whole.Split(whole.rank % 2, -whole.rank)
    made = join(part, whole, check_start(whole), 30)
    alike = [rank for rank in range(whole.size) if rank % 2 == whole.rank % 2]
    agree(world, made.first == alike[-1] and made.everyone == "all ranks of its comm")
    job = runtime.world()
    agree(world, job.first is None and job.everyone == "all ranks of the job")
    for comm in (made.watchdogs, made.comm, part):
        comm.Free()
