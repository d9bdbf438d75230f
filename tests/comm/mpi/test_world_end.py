"""The wait of a world's ranks for each other before MPI ends."""

import time

import pytest

from mpidist.comm.mpi import runtime, world_end
from mpidist.comm.mpi.library import MPI
from tests.tools.support import agree, mpich_between_nodes, short_job

TAG = 91


@pytest.fixture
def comm(world):
    made = runtime.world().comm.Dup()
    yield made
    made.Free()


@pytest.mark.mpi
def test_no_rank_goes_on_before_all_have_come(group, comm):
    for late in (0, comm.Get_size() - 1):
        group.barrier()
        if group.rank == late:
            time.sleep(0.1)
        begin = time.monotonic()
        assert world_end.await_end(comm, TAG)
        times = group.all_gather_object((begin, time.monotonic()))
        agree(group, max(first for first, _ in times) <= min(last for _, last in times), str(times))


@pytest.mark.mpi
def test_a_limit_ends_the_wait_and_rank_0_tells_the_others(group, comm):
    if group.rank:
        assert not world_end.await_end(comm, TAG, 0.05)
    group.barrier()
    if not group.rank:
        # All have come, though none of them waits.
        assert world_end.await_end(comm, TAG, 5.0)
    group.barrier()
    world_end.drain([comm])
    # Nothing of the round before is left for this one.
    group.barrier()
    assert world_end.await_end(comm, TAG)


@pytest.mark.mpi
def test_last_messages_are_received(group, comm):
    to = (group.rank + 1) % group.size
    # The send of a long message is over when it is received.
    requests = [comm.Isend((bytes(n), n, MPI.BYTE), to, TAG) for n in (0, 3, 1_000_000)]
    while not all([request.Test() for request in requests]):
        world_end.drain([comm])
    # Others may still wait for this rank to receive.
    all_are_over = group.barrier(async_op=True)
    while not all_are_over.is_completed():
        world_end.drain([comm])
    world_end.drain([comm])


class _Failing:
    """A communicator of three ranks whose every call reports a death."""

    def __init__(self, rank):
        self.rank = rank

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return 3

    def Isend(self, *message):
        raise RuntimeError("MPI_ERR_PROC_FAILED")

    Improbe = Isend


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_have_died_are_not_waited_for(rank):
    assert world_end.await_end(_Failing(rank), TAG)
    world_end.drain([_Failing(rank)])


_LATE = """
    import time
    import mpidist.comm
    group = mpidist.comm.init()
    group.barrier()
    if group.rank == 0:
        time.sleep(1)  # the others come to their end, and would be gone
    group.close()
    print(f"rank {group.rank} of {group.size} has closed its group", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_late_rank_ends_between_nodes_of_mpich(ranks):
    """MPI_Finalize waits for nobody there."""
    done = short_job(ranks, _LATE, **mpich_between_nodes(ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has closed its group") == ranks
