"""Mixed groups: one backend for each device type, with Gloo or NCCL as the other one."""

import shutil
import tempfile
import uuid

import pytest
import torch
import torch.distributed as dist

from tests.tools.support import agree, busy, raises_on_all

pytestmark = pytest.mark.mpi(min_size=1)

LISTS = ("cpu:gloo,cuda:mpidist", "cpu:mpidist,cuda:gloo")


@pytest.fixture(params=LISTS)
def shared(world, request):
    """torch's default group on a list of backends; tensors of the host go to the first."""
    world.barrier()
    dist.init_process_group(request.param, init_method="mpi://")
    yield dist.group.WORLD
    world.barrier()
    dist.destroy_process_group()


def test_calls_go_to_the_backend_of_their_tensors(world, shared):
    size, rank = world.size, world.rank
    one, rows = torch.full((2,), float(rank)), torch.empty(2 * size)
    parts = [torch.empty(2) for _ in range(size)]
    total = float(sum(range(size)))
    x = one.clone()
    dist.all_reduce(x)
    agree(world, x.tolist() == [total] * 2, f"all_reduce {x}")
    x = one.clone()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    agree(world, x.tolist() == [total] * 2 and work.is_completed(), f"async {x}")
    x = one.clone()
    dist.broadcast(x, size - 1)
    agree(world, x.tolist() == [size - 1.0] * 2, f"broadcast {x}")
    dist.all_gather(parts, one)
    dist.all_gather_into_tensor(rows, one)
    every = torch.arange(float(size)).repeat_interleave(2)
    agree(world, torch.equal(torch.cat(parts), every) and torch.equal(rows, every), f"{rows}")
    gathered = [None] * size
    dist.all_gather_object(gathered, rank)
    agree(world, gathered == list(range(size)), f"{gathered}")
    if size > 1:
        to, source, got = (rank + 1) % size, (rank - 1) % size, torch.empty(2)
        for sent in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, one, to), dist.P2POp(dist.irecv, got, source)]
        ):
            sent.wait()
        agree(world, got.tolist() == [float(source)] * 2, f"{got}")
    dist.barrier()
    shared.monitored_barrier()


@pytest.mark.parametrize("listed", LISTS)
def test_groups_of_one_name_after_another(world, listed):
    """torch counts its groups from 0 again; the store, here the caller's, has the older keys."""
    address = world.broadcast_object(f"{dist.FileStore.__name__}-{uuid.uuid4().hex}", 0)
    folder = world.broadcast_object(tempfile.mkdtemp(), 0)
    try:
        for number in range(6):
            store = dist.FileStore(f"{folder}/{address}", world.size)
            dist.init_process_group(listed, store=store, rank=world.rank, world_size=world.size)
            groups = [dist.group.WORLD, dist.new_group(), dist.new_group([world.size - 1])]
            sums = []
            for group in groups[: 3 if world.rank == world.size - 1 else 2]:
                x = torch.full((3,), float(world.rank + number))
                dist.all_reduce(x, group=group)
                sums.append(x.tolist())
            whole = float(sum(rank + number for rank in range(world.size)))
            wanted = [[whole] * 3, [whole] * 3, [float(world.rank + number)] * 3][: len(sums)]
            dist.destroy_process_group()
            agree(world, sums == wanted, f"group {number}: {sums}")
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)


def test_a_mixed_group_has_the_devices_that_torch_reads(world, shared):
    kinds = sorted(device.type for device in shared._device_types)
    backends = {kind: shared._get_backend(torch.device(kind)).name() for kind in kinds}
    listed = dict(pair.split(":") for pair in dist.get_backend().split(","))
    agree(world, kinds == ["cpu", "cuda"] and backends == listed, f"{backends} {listed}")
    with pytest.raises(RuntimeError, match="got device meta"):
        shared._get_backend(torch.device("meta"))
    with pytest.raises(NotImplementedError, match="shared by device"):
        shared.split_group([0])


def test_a_library_beside_mpidist_takes_the_devices_tensors(world, target):
    """NCCL refuses two ranks on one device: groups of one rank, and of all where devices suffice.

    On the CPU Gloo takes the host's tensors in NCCL's place.
    """
    theirs = "cpu:mpidist,cuda:nccl" if target.type == "cuda" else "cpu:gloo,cuda:mpidist"
    dist.init_process_group("mpidist", init_method="mpi://")
    try:
        groups = [dist.new_group([rank], backend=theirs) for rank in range(world.size)]
        every = [groups[world.rank]]
        if target.type == "cpu" or torch.cuda.device_count() >= world.size:
            every.append(dist.new_group(backend=theirs))
        own = torch.device("cuda", world.rank) if len(every) > 1 else target
        device = own if target.type == "cuda" else target
        for group in every:
            size = dist.get_world_size(group)
            # In one order on all ranks.
            for there in dict.fromkeys([device, torch.device("cpu")]):
                x = torch.full((3000,), float(world.rank), device=there)
                busy(there)
                x += 1
                dist.all_reduce(x, group=group)
                total = world.rank + 1.0 if size == 1 else sum(range(1, size + 1))
                agree(world, x.tolist() == [total] * 3000, f"{theirs} of {size} on {there}: {x}")
            (pair,) = [text for text in theirs.split(",") if text.startswith(device.type)]
            name = group._get_backend(device).name()
            agree(world, name == pair.split(":")[1], f"{name} of {device}")
    finally:
        world.barrier()
        dist.destroy_process_group()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_backends_raise(world):
    ours_first = "rank 1: cuda:mpidist,cpu:gloo"
    named = "mpidist" if world.rank == 0 else LISTS[0]
    raises_on_all(world, ValueError, lambda: dist.init_process_group(named), ours_first)
    agree(world, not dist.is_initialized())
