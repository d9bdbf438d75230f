"""Worlds of some of the job's ranks: made, used beside other programs, and left for the next."""

import json
import threading

import pytest
import torch.distributed as dist

from mpidist.comm import world_group
from mpidist.comm.group import ProcessGroup
from mpidist.comm.mpi import runtime
from mpidist.comm.world_group import native_group
from tests.tools.support import agree, printed, raises_on_all
from tests.tools.support import short_job as run

# The last ranks train, in reverse order; rank 0 runs a program of its own in plain mpi4py.
_TWO_PROGRAMS = """
    import json
    from mpi4py import MPI

    whole = MPI.COMM_WORLD
    is_producer = whole.rank == 0
    comm = whole.Split(int(is_producer), -whole.rank)
    if is_producer:
        for step in range(4):
            for rank in range(1, whole.size):
                whole.send([step, rank], rank, tag=5)
        total = whole.reduce(0.0, MPI.SUM, 0)
        print(json.dumps({"rank": 0, "total": total}))
        raise SystemExit

    import torch
    import torch.distributed as dist
    import mpidist.comm
    import mpidist.rpc as rpc
    from mpidist.ddp import DistributedDataParallel

    world = mpidist.comm.init(comm=comm)
    assert (world.rank, world.size) == (comm.rank, comm.size) == (
        whole.size - 1 - whole.rank, whole.size - 1)
    assert mpidist.comm.init() is world is mpidist.comm.init(comm=comm)
    assert mpidist.comm.init(comm=comm.Dup()) is world
    comm.Free()
    tensor = torch.full((3,), float(world.rank))
    world.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(world.size))] * 3
    assert world.all_gather_object(whole.rank) == list(range(whole.size - 1, 0, -1))
    rpc.init_rpc(f"worker{world.rank}")
    right = (world.rank + 1) % world.size
    assert rpc.rpc_sync(f"worker{right}", pow, (right, 2)) == right**2
    rpc.shutdown()

    dist.init_process_group("mpidist", init_method="mpi://")
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    some = dist.new_group([0, world.size - 1])
    if world.rank in (0, world.size - 1):
        dist.all_reduce(tensor, group=some)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    for kind in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        net = kind(model)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(2):
            number, rank = whole.recv(source=0, tag=5)
            assert rank == whole.rank
            optimizer.zero_grad()
            net(torch.full((1, 2), float(number + rank))).sum().backward()
            optimizer.step()
    weights = world.all_gather_object(model.weight.tolist())
    assert weights == weights[:1] * world.size and weights[0] != [[0, 0]], weights
    dist.destroy_process_group()
    whole.reduce(float(world.rank), MPI.SUM, 0)
    print(json.dumps({"rank": whole.rank}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.long), 4])
def test_some_ranks_train_while_another_runs_plain_mpi(ranks):
    found = printed(run(ranks, _TWO_PROGRAMS))
    assert sorted(found) == list(range(ranks))
    assert found[0]["total"] == sum(range(ranks - 1))


_ONE_AFTER_ANOTHER = """
    import json, gc, os, threading
    import torch
    import torch.distributed as dist
    from mpi4py import MPI
    import mpidist.comm
    import mpidist.rpc as rpc
    from mpidist.errors import GroupError
    from mpidist.optim import OSS

    whole = MPI.COMM_WORLD
    seen = []
    for turn in range(6):
        # Each turn leaves out another rank, which is alone in its own world.
        left_out = turn % whole.size
        comm = whole.Split(int(whole.rank == left_out), (whole.rank + turn) % whole.size)
        world = mpidist.comm.init(comm=comm)
        assert (world.rank, world.size) == (comm.rank, comm.size)
        clone = world.clone()
        assert clone.all_gather_object(turn) == [turn] * world.size
        rpc.init_rpc(f"worker{world.rank}")
        assert rpc.rpc_sync("worker0", pow, (world.rank, 2)) == world.rank**2
        rpc.shutdown()
        dist.init_process_group("mpidist", init_method="mpi://")
        store = dist.distributed_c10d._get_default_store()
        store.set(f"here{world.rank}", str(turn))
        assert store.get(f"here{(world.rank + 1) % world.size}") == str(turn).encode()
        assert store.add("sum", 1) <= world.size
        pair = dist.new_group(list(range(min(2, world.size))))
        model = torch.nn.Linear(3, 2)
        optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict()
        keys = [world.key, clone.key]
        texts = []
        for other in (whole, comm):
            if other is whole or turn == 0:
                try:
                    mpidist.comm.init(comm=whole)
                except GroupError as error:
                    texts.append(str(error))
        assert all("groups of another world are open" in text for text in texts), texts
        dist.destroy_process_group()
        clone.close()
        world.close()
        del optimizer, model
        gc.collect()
        threads = sorted(thread.name for thread in threading.enumerate())
        descriptors = len(os.listdir("/proc/self/fd"))
        seen.append([keys, threads, descriptors])
    world = mpidist.comm.init(comm=whole)
    assert world.size == whole.size
    world.barrier()
    print(json.dumps({"rank": whole.rank, "seen": seen, "texts": texts}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.long)])
def test_one_world_follows_another_with_keys_of_its_own_and_counts_from_one(ranks):
    done = run(ranks, _ONE_AFTER_ANOTHER)
    for found in printed(done).values():
        keys, threads, descriptors = zip(*found["seen"], strict=True)
        parts = [[key.partition("/") for key in one] for one in keys]
        assert len({key for one in parts for key, _, _ in one}) == len(keys), keys
        counts = [[rest for _, _, rest in one] for one in parts]
        assert all(one == counts[0] for one in counts), keys
        assert all(names.count("mpidist-watchdog") <= 1 for names in threads), threads
        assert max(descriptors[3:]) <= max(descriptors[:3]) + 2, descriptors


_ONE_DIES = """
    import json, os, signal
    import torch
    import torch.distributed as dist
    from mpi4py import MPI
    import mpidist.comm
    from mpidist.errors import MpidistError

    whole = MPI.COMM_WORLD
    whole.Set_errhandler(MPI.ERRORS_RETURN)
    world = mpidist.comm.init()
    dist.init_process_group("mpidist")
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(torch.ones(2))
    except MpidistError as error:
        lost = error.ranks
    dist.destroy_process_group()
    world.close()
    survivors = mpidist.comm.init(comm=whole.Shrink())
    dist.init_process_group("mpidist")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    net(torch.ones(1, 2)).sum().backward()
    names = survivors.all_gather_object([survivors.key, whole.rank])
    found = {"rank": whole.rank, "before": world.key, "lost": lost, "names": names}
    print(json.dumps(found), flush=True)
    survivors.barrier()
"""


@pytest.mark.slow
def test_survivors_of_a_death_are_a_world():
    done = run(4, _ONE_DIES, "--with-ft", "ulfm")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == [0, 2, 3], done.stdout + done.stderr
    keys = {key for line in lines for key, _ in line["names"]}
    for line in lines:
        assert line["lost"] == [1], line
        assert [rank for _, rank in line["names"]] == [0, 2, 3], line
        assert line["before"] not in keys, line
    assert len(keys) == 1, lines


@pytest.mark.mpi
def test_a_communicator_that_makes_no_world_is_refused(world):
    from mpi4py import MPI

    from mpidist.comm import init

    freed = MPI.COMM_SELF.Dup()
    freed.Free()
    for wrong, error, text in (
        (MPI.COMM_NULL, ValueError, "COMM_NULL"),
        (freed, ValueError, "freed"),
        (world, TypeError, "got ProcessGroup"),
    ):
        raises_on_all(world, error, lambda wrong=wrong: init(comm=wrong), text)


@pytest.mark.mpi(min_size=2)
def test_no_world_is_left_while_its_groups_are_open(world):
    from mpi4py import MPI

    from mpidist.comm import init
    from mpidist.errors import GroupError

    assert init(comm=MPI.COMM_WORLD) is world
    half = MPI.COMM_WORLD.Split(world.rank % 2, world.rank)
    text = raises_on_all(world, GroupError, lambda: init(comm=half), "of another world are open")
    assert f'group "{world.name}"' in text
    turned = MPI.COMM_WORLD.Split(0, -world.rank)
    raises_on_all(world, GroupError, lambda: init(comm=turned), "close them first")
    for comm in (half, turned):
        comm.Free()
    world.barrier()
    assert init() is world


@pytest.mark.mpi(min_size=2)
def test_an_intercommunicator_makes_no_world(world):
    from mpi4py import MPI

    from mpidist.comm import init

    half = MPI.COMM_WORLD.Split(world.rank % 2, world.rank)
    inter = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - world.rank % 2, 7)
    raises_on_all(world, ValueError, lambda: init(comm=inter), "intercommunicator")
    inter.Free()
    half.Free()


@pytest.mark.mpi
def test_ours_stays_and_none_is_the_world(group, world):
    assert native_group(group) is group
    assert not dist.is_initialized()
    agree(group, native_group(None) is world and world_group.default_group() is world)


@pytest.mark.mpi
def test_torchs_group_is_the_one_it_wraps(default_group, world):
    native = native_group(dist.group.WORLD)
    assert isinstance(native, ProcessGroup) and native is dist.group.WORLD.native
    # After torch's init_process_group, None is torch's default group.
    assert world_group.default_group() is dist.group.WORLD and native_group(None) is native
    part = dist.new_group()
    agree(world, native_group(part) is part.native and part.native is not native)
    dist.destroy_process_group(part)


@pytest.mark.mpi
@pytest.mark.parametrize("other", ["world", 3, object()], ids=["text", "number", "object"])
def test_another_groups_type_is_named(world, other):
    with pytest.raises(TypeError, match=f"needs a group of mpidist.*got {type(other).__name__}"):
        native_group(other)


@pytest.mark.mpi
def test_a_world_settles_when_its_asynchronous_operations_have_ended(group):
    ends = threading.Event()
    work = group.in_order(ends.wait, async_op=True, operation="of the test")
    runtime.settle_world(0.05)
    has_been_left = not work.is_completed()
    threading.Timer(0.05, ends.set).start()
    runtime.settle_world(None)
    agree(group, has_been_left and work.is_completed())
