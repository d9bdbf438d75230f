"""States of ranks in a report: small groups one by one, large ones folded onto one screen."""

from mpidist.comm.execution.op_status import Entry
from mpidist.comm.mpi.world import Process
from mpidist.comm.watchdog import rank_states
from mpidist.comm.watchdog.rank_states import RankState

SCREEN = 30  # lines


def entry(operation="all_reduce", sequence=5, seconds=6.0, queued=0):
    return Entry("world", "key", sequence, operation, (3,), "torch.float32", seconds, queued)


def state(rank, *entries, line=40, inner="mpi4py/MPI.py:1", **changes):
    """A rank that has entered these operations in a line of train.py, eight ranks to a node."""
    place = f"main thread: train.py:{line} in train(), within {inner}"
    values = {"world_rank": rank, "process": Process(1000 + rank, f"node{rank // 8}")}
    return RankState(rank, **(values | {"entries": entries, "places": (place,)} | changes))


def test_up_to_eight_ranks_stand_one_by_one_in_their_order():
    lines, named = rank_states.listing([state(rank, entry()) for rank in range(8)])
    assert [line for line in lines if line.startswith("  rank")] == [
        f'  rank {rank}: in number 5 all_reduce(shape=(3,), dtype=torch.float32) of group "world" '
        "for 6.0 s"
        for rank in range(8)
    ]
    assert lines[3] == (
        "    process 1001 on node0, main thread: train.py:40 in train(), within mpi4py/MPI.py:1"
    )
    assert named == tuple(range(8))


def test_of_512_ranks_the_odd_ones_come_first_and_the_others_are_one_entry():
    """Times, queues and inner frames of ranks in one state differ."""
    states = [
        state(rank, entry(seconds=5.0 + rank % 10 / 10, queued=rank % 2), inner=f"x.py:{rank % 3}")
        for rank in range(512)
    ]
    states[300] = state(300, entry("barrier", 4, None), line=12)
    states[17] = RankState(17, 17, "has exited")
    states[18] = RankState(18, 18, "has exited")
    lines, named = rank_states.listing(states)
    assert lines == [
        '  rank 300: outside any collective of group "world"; the last was number 4, barrier',
        "    process 1300 on node37, main thread: train.py:12 in train(), within mpi4py/MPI.py:1",
        "  ranks 17, 18: has exited",
        "  ranks 0-16, 19-299, 301-511: in number 5 all_reduce(shape=(3,), dtype=torch.float32) of "
        'group "world" for 5.9 s, 1 queued behind it at most',
        "    509 processes on 64 hosts; the first is 1000 on node0, main thread: "
        "train.py:40 in train()",
        "      within x.py:0",
    ]
    assert named == (300, 0)


def test_the_ranks_of_one_node_are_told_by_its_name():
    states = [
        state(rank, entry()) if rank // 8 != 3 else state(rank, words="no answer", places=())
        for rank in range(512)
    ]
    lines, _ = rank_states.listing(states)
    assert lines[:2] == [
        "  ranks 24-31: no answer",
        "    8 processes on node3; the first is 1024 on node3",
    ]


def test_world_ranks_are_named_where_they_differ():
    states = [state(rank, entry(), world_rank=rank + 4) for rank in range(12)]
    assert rank_states.listing(states).lines[0].startswith("  ranks 0-11 (world ranks 4-15): in ")


def test_512_ranks_at_512_lines_fit_on_a_screen():
    """Ranks in one operation are one entry wherever they stand; of many operations eight are."""
    states = [state(rank, entry("barrier", 4, None), line=rank) for rank in range(100)]
    states += [state(rank, entry(), line=rank) for rank in range(100, 512)]
    lines, named = rank_states.listing(states)
    assert lines[1].startswith("    100 processes on 13 hosts at 100 places; the first is 1000 ")
    assert len(lines) <= SCREEN and named == (0, 100)

    states[:100] = [state(rank, entry(sequence=rank + 10)) for rank in range(100)]
    lines, named = rank_states.listing(states)
    assert lines[-1] == "  ranks 7-99: in 93 other states"
    assert lines[-4].startswith("  ranks 100-511: in number 5 all_reduce")
    assert len(lines) <= SCREEN and named == (*range(7), 100)
