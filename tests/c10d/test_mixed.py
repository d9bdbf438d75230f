"""Mixed groups: one backend for each device type, with Gloo as the other one."""

import pytest
import torch
import torch.distributed as dist

from tests.support import agree, raises_on_all

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


def test_a_mixed_group_has_the_devices_that_torch_reads(world, shared):
    kinds = sorted(device.type for device in shared._device_types)
    backends = {kind: shared._get_backend(torch.device(kind)).name() for kind in kinds}
    listed = dict(pair.split(":") for pair in dist.get_backend().split(","))
    agree(world, kinds == ["cpu", "cuda"] and backends == listed, f"{backends} {listed}")
    with pytest.raises(RuntimeError, match="got device meta"):
        shared._get_backend(torch.device("meta"))
    with pytest.raises(NotImplementedError, match="shared by device"):
        shared.split_group([0])


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_backends_raise(world):
    ours_first = "rank 1: cuda:mpidist,cpu:gloo"
    named = "mpidist" if world.rank == 0 else LISTS[0]
    raises_on_all(world, ValueError, lambda: dist.init_process_group(named), ours_first)
    agree(world, not dist.is_initialized())
