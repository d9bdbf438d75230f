"""Stream order of torch.distributed's calls with CUDA tensors on mpidist's backend.

Slow kernels still write the inputs at the call, and the results are used at once. Results in detail
are tested on the CPU; here each call is made once per layout of its arguments.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("default_group")]

SLOW_CYCLES = 4_000_000  # about 2 ms
NUMEL = 70_000


# The CPU variant verifies these tests themselves; the calls have further tests on the CPU.
@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.long),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def made(request, world):
    """Return a function that creates a rank's contribution after a slow kernel."""

    def make(rank=world.rank, dtype=torch.float32, numel=NUMEL):
        # the product of five ranks' fits into a byte
        values = ((torch.arange(numel) + rank) % 3 + 1).to(dtype)
        if request.param == "cpu":
            return values
        tensor, there = torch.zeros(numel, dtype=dtype, device="cuda"), values.cuda()
        torch.cuda._sleep(SLOW_CYCLES)
        return tensor.copy_(there)

    return make


def same(world, got, wanted, text):
    agree(
        world,
        got.device == wanted.device and torch.equal(got, wanted),
        f"{text}: got {got[:5]}, not {wanted[:5]}",
    )


def waited(work):
    if work is not None:
        work.wait()


@pytest.mark.parametrize("async_op", [False, True])
def test_reductions(world, made, async_op):
    ranks, last = range(world.size), world.size - 1
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ):
        every = torch.stack([made(rank, dtype) for rank in ranks]).double()
        for op, wanted in (
            (ReduceOp.SUM, every.sum(0)),
            (ReduceOp.MAX, every.amax(0)),
            (ReduceOp.PRODUCT, every.prod(0)),
        ):
            tensor = made(dtype=dtype)
            waited(dist.all_reduce(tensor, op, async_op=async_op))
            same(world, tensor, wanted.to(dtype), f"all_reduce {op} {dtype}")
            waited(dist.reduce(tensor := made(dtype=dtype), last, op, async_op=async_op))
            same(
                world,
                tensor,
                wanted.to(dtype) if world.rank == last else made(dtype=dtype),
                f"reduce {op} {dtype}",
            )
        shard = torch.empty_like(made(dtype=dtype))
        waited(
            dist.reduce_scatter_tensor(
                shard, made(dtype=dtype).repeat(world.size), async_op=async_op
            )
        )
        same(world, shard, every.sum(0).to(dtype), f"reduce_scatter_tensor {dtype}")
        waited(
            dist.reduce_scatter(
                shard.zero_(), [made(dtype=dtype) for _ in ranks], async_op=async_op
            )
        )
        same(world, shard, every.sum(0).to(dtype), f"reduce_scatter {dtype}")


@pytest.mark.parametrize("async_op", [False, True])
def test_movements(world, made, async_op):
    ranks = range(world.size)
    every = torch.cat([made(rank) for rank in ranks])
    waited(dist.broadcast(tensor := made(), world.size - 1, async_op=async_op))
    same(world, tensor, made(world.size - 1), "broadcast")
    gathered = torch.zeros_like(every)
    waited(dist.all_gather_into_tensor(gathered, made(), async_op=async_op))
    same(world, gathered, every, "all_gather_into_tensor")
    uneven = [torch.zeros_like(made(rank, numel=100 * rank)) for rank in ranks]
    waited(dist.all_gather(uneven, made(numel=100 * world.rank), async_op=async_op))
    same(
        world,
        torch.cat(uneven),
        torch.cat([made(rank, numel=100 * rank) for rank in ranks]),
        "all_gather",
    )
    lists = [torch.zeros_like(made()) for _ in ranks] if world.rank == 0 else None
    waited(dist.gather(made(), lists, 0, async_op=async_op))
    same(
        world,
        made() if lists is None else torch.cat(lists),
        made() if lists is None else every,
        "gather",
    )
    part = torch.zeros_like(made())
    waited(
        dist.scatter(
            part, [made(rank) for rank in ranks] if world.rank == 0 else None, 0, async_op=async_op
        )
    )
    same(world, part, made(), "scatter")
    swapped = torch.zeros_like(every)
    waited(dist.all_to_all_single(swapped, every + 100 * world.rank, async_op=async_op))
    same(world, swapped, torch.cat([made() + 100 * rank for rank in ranks]), "all_to_all_single")
    parts = list(torch.zeros_like(every).split(NUMEL))
    waited(
        dist.all_to_all(parts, [made(rank) + 100 * world.rank for rank in ranks], async_op=async_op)
    )
    same(world, torch.cat(parts), swapped, "all_to_all")


def test_messages(world, made):
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for numel in (0, 1, 3000, 1_000_003):
        got = torch.zeros_like(made(numel=numel))
        works = [dist.irecv(got, before), dist.isend(made(numel=numel), following)]
        for work in works:
            work.wait()
        same(world, got, made(before, numel=numel), f"irecv of {numel}")
        calls = [
            dist.P2POp(dist.isend, made(numel=numel), following),
            dist.P2POp(dist.irecv, got.zero_(), before),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        same(world, got, made(before, numel=numel), f"batch_isend_irecv of {numel}")


def test_coalesced_and_functional_calls(world, made):
    every = torch.stack([made(rank) for rank in range(world.size)])
    tensors = [made(), made(numel=7)]
    with _coalescing_manager(device=tensors[0].device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    same(world, torch.cat(tensors), torch.cat([every.sum(0), every[:, :7].sum(0)]), "coalesced")
    group = dist.group.WORLD
    same(
        world,
        functional.all_reduce(made(), "sum", group) + 1,
        every.sum(0) + 1,
        "functional all_reduce",
    )
    same(
        world,
        functional.all_gather_tensor(made(), 0, group) + 1,
        every.flatten() + 1,
        "functional all_gather_tensor",
    )
    scattered = functional.reduce_scatter_tensor(made().repeat(world.size), "sum", 0, group) + 1
    same(world, scattered, every.sum(0) + 1, "functional reduce_scatter_tensor")


def test_objects_and_barriers(world, made):
    everyones = [None] * world.size
    dist.all_gather_object(everyones, {"rank": world.rank, "tensor": made()})
    agree(
        world,
        all(
            one["rank"] == rank and torch.equal(one["tensor"], made(rank))
            for rank, one in enumerate(everyones)
        ),
    )
    dist.barrier()
    dist.barrier(async_op=True).wait()
