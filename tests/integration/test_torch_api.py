"""Every collective of torch.distributed on mpidist's backend."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from mpidist.errors import CommTimeout
from tests.tools.support import agree, raises_on_all, reduced

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group")]

OPERATIONS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]


def mine(rank, dtype=torch.float32, numel=5):
    """A rank's contribution: small integers, so that sums are exact in any order."""
    values = torch.arange(1, numel + 1) % 3 + rank + 1
    if dtype.is_complex:
        return torch.complex(values.double(), -(values + 1).double()).to(dtype)
    return values % 2 == 0 if dtype is torch.bool else values.to(dtype)


def parts(world, dtype=torch.float32, numel=5):
    return [mine(rank, dtype, numel) for rank in range(world.size)]


def same(world, got, wanted, text=""):
    ok = got.dtype == wanted.dtype and torch.equal(got, wanted)
    agree(world, ok, f"{text}: got {got.tolist()}, not {wanted.tolist()}")


@pytest.mark.parametrize("dtype", [*REALS, *INTEGERS, torch.bool], ids=str)
def test_all_reduce(world, dtype):
    for op, torchs in OPERATIONS.items():
        tensor = mine(world.rank, dtype)
        bitwise_of_fractions = dtype.is_floating_point and op in ("band", "bor", "bxor")
        if bitwise_of_fractions or (dtype is torch.bool and op == "avg"):
            raises_on_all(world, TypeError, lambda t=tensor, o=torchs: dist.all_reduce(t, o))
            continue
        dist.all_reduce(tensor, torchs)
        same(world, tensor, reduced(parts(world, dtype), op), f"{dtype} {op}")


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_all_reduce_of_complex_numbers(world, dtype):
    for op in ("sum", "avg"):
        tensor = mine(world.rank, dtype)
        dist.all_reduce(tensor, OPERATIONS[op])
        same(world, tensor, reduced(parts(world, dtype), op), op)
    raises_on_all(
        world, ValueError, lambda: dist.all_reduce(mine(world.rank, dtype), ReduceOp.MAX), "complex"
    )


@pytest.mark.parametrize("factor", [0.5, torch.tensor(3.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_all_reduce_of_multiples(world, dtype, factor):
    tensor = mine(world.rank, dtype)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
    same(
        world,
        tensor,
        reduced([part * float(factor) for part in parts(world, dtype)], "sum"),
        str(factor),
    )


def test_all_reduce_of_a_parameter_and_of_odd_layouts(world):
    weight = torch.nn.Parameter(mine(world.rank))
    dist.all_reduce(weight)
    same(world, weight.detach(), reduced(parts(world), "sum"), "parameter")
    columns = mine(world.rank, numel=12).view(3, 4).t()
    dist.all_reduce(columns)
    same(world, columns, reduced(parts(world, numel=12), "sum").view(3, 4).t(), "transposed")
    empty = torch.empty(0)
    dist.all_reduce(empty)
    number = torch.tensor(float(world.rank))
    dist.all_reduce(number)
    same(world, number, torch.tensor(float(sum(range(world.size)))), "number")


def test_asynchronous_all_reduce(world):
    tensor = mine(world.rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    same(world, tensor, reduced(parts(world), "sum"))


def test_then_of_a_future_gets_the_tensors(world):
    tensor = mine(world.rank)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() + 1)
    same(world, halved.wait(), reduced(parts(world), "sum") / 2 + 1)


def test_reduce(world):
    for root in range(world.size):
        for op in ("sum", "max", "avg"):
            tensor = mine(world.rank)
            dist.reduce(tensor, root, OPERATIONS[op])
            wanted = reduced(parts(world), op) if world.rank == root else mine(world.rank)
            same(world, tensor, wanted, f"{op} to {root}")


@pytest.mark.parametrize("dtype", [*REALS, torch.int64, torch.bool, torch.complex64], ids=str)
def test_broadcast(world, dtype):
    for root in range(world.size):
        tensor = mine(world.rank, dtype)
        dist.broadcast(tensor, root)
        same(world, tensor, mine(root, dtype), f"from {root}")
    work = dist.broadcast(tensor := mine(world.rank, dtype), 0, async_op=True)
    work.wait()
    same(world, tensor, mine(0, dtype), "async")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str
)
def test_all_gather(world, dtype):
    got = [torch.zeros_like(part) for part in parts(world, dtype)]
    dist.all_gather(got, mine(world.rank, dtype))
    same(world, torch.stack(got), torch.stack(parts(world, dtype)))


def test_all_gather_of_uneven_sizes(world):
    wanted = [mine(rank, numel=2 * rank) for rank in range(world.size)]  # rank 0 has nothing
    got = [torch.full_like(part, -1) for part in wanted]
    dist.all_gather(got, wanted[world.rank])
    same(world, torch.cat(got), torch.cat(wanted))


def test_all_gather_into_tensor(world):
    got = torch.zeros(5 * world.size)
    dist.all_gather_into_tensor(got, mine(world.rank))
    same(world, got, torch.cat(parts(world)))
    stacked = torch.zeros(world.size, 5)
    dist.all_gather_into_tensor(stacked, mine(world.rank), async_op=True).wait()
    same(world, stacked, torch.stack(parts(world)), "stacked")


def test_gather_and_scatter(world):
    for root in range(world.size):
        got = [torch.zeros(5) for _ in range(world.size)] if world.rank == root else None
        dist.gather(mine(world.rank), got, root)
        if world.rank == root:
            assert torch.equal(torch.stack(got), torch.stack(parts(world)))
        part = torch.zeros(5)
        given = [2 * p for p in parts(world)] if world.rank == root else None
        dist.scatter(part, given, root)
        same(world, part, 2 * mine(world.rank), f"root {root}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_reduce_scatter(world, dtype):
    # Rank r sends rank i its contribution times i + 1.
    given = [mine(world.rank, dtype) * (place + 1) for place in range(world.size)]
    wanted = reduced([part * (world.rank + 1) for part in parts(world, dtype)], "sum")
    got = torch.zeros(5, dtype=dtype)
    dist.reduce_scatter(got, given)
    same(world, got, wanted, "list")
    got.zero_()
    dist.reduce_scatter_tensor(got, torch.cat(given))
    same(world, got, wanted, "tensor")
    dist.reduce_scatter_tensor(got, torch.stack(given), op=ReduceOp.MAX, async_op=True).wait()
    same(
        world, got, reduced([part * (world.rank + 1) for part in parts(world, dtype)], "max"), "max"
    )


def test_all_to_all(world):
    def words(sender, receiver):
        return torch.full((sender + 2 * receiver,), float(10 * sender + receiver))

    given = [words(world.rank, to) for to in range(world.size)]
    wanted = [words(source, world.rank) for source in range(world.size)]
    got = [torch.full_like(part, -1) for part in wanted]
    dist.all_to_all(got, given)
    same(world, torch.cat(got), torch.cat(wanted), "lists")
    out = torch.full((sum(len(part) for part in wanted),), -1.0)
    sizes = [len(part) for part in wanted], [len(part) for part in given]
    dist.all_to_all_single(out, torch.cat(given), *sizes)
    same(world, out, torch.cat(wanted), "uneven")
    rows = torch.arange(2.0 * world.size).view(world.size, 2) + 100 * world.rank
    even = torch.zeros_like(rows)
    dist.all_to_all_single(even, rows, async_op=True).wait()
    wanted = [torch.arange(2.0) + 2 * world.rank + 100 * source for source in range(world.size)]
    same(world, even, torch.stack(wanted), "even")


def test_barriers_wait_for_all_ranks(world, default_group, tmp_path):
    folder = type(tmp_path)(world.broadcast_object(str(tmp_path), 0))
    barriers = [
        dist.barrier,
        lambda: dist.barrier(async_op=True).wait(),
        lambda: default_group.monitored_barrier(timedelta(seconds=60)),
        default_group.monitored_barrier,
        lambda: dist.monitored_barrier(timeout=timedelta(seconds=60)),
        dist.distributed_c10d.monitored_barrier,
    ]
    found = []
    for number, barrier in enumerate(barriers):
        (folder / f"{number}-{world.rank}").touch()
        barrier()
        found.append(len(list(folder.glob(f"{number}-*"))))
    agree(world, found == [world.size] * len(barriers), f"ranks that had entered: {found}")


@pytest.mark.filterwarnings(
    "ignore:.*will be deprecated.*:FutureWarning", "ignore::DeprecationWarning"
)
def test_coalesced_collectives(world):
    tensors = [mine(world.rank), mine(world.rank, numel=7)]
    dist.all_reduce_coalesced(tensors)
    same(
        world,
        torch.cat(tensors),
        torch.cat([reduced(parts(world), "sum"), reduced(parts(world, numel=7), "sum")]),
    )
    tensors = [mine(world.rank), mine(world.rank, numel=7)]
    dist.all_reduce_coalesced(tensors, op=ReduceOp.MAX, async_op=True).wait()
    same(
        world,
        torch.cat(tensors),
        torch.cat([reduced(parts(world), "max"), reduced(parts(world, numel=7), "max")]),
    )
    rows = [[torch.zeros(5), torch.zeros(7)] for _ in range(world.size)]
    dist.all_gather_coalesced(rows, [mine(world.rank), mine(world.rank, numel=7)])
    wanted = [torch.cat([mine(rank), mine(rank, numel=7)]) for rank in range(world.size)]
    same(world, torch.stack([torch.cat(row) for row in rows]), torch.stack(wanted))


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["anywhere", "cpu"])
@pytest.mark.parametrize("async_ops", [False, True])
class TestCoalescingManager:
    def collect(self, device, async_ops, calls):
        with _coalescing_manager(device=device, async_ops=async_ops) as manager:
            for call in calls:
                call()
        if async_ops:
            manager.wait()

    def after(self, world):
        """An all-reduce after the manager must reduce, which needs the backend's two methods."""
        tensor = mine(world.rank)
        dist.all_reduce(tensor)
        same(world, tensor, reduced(parts(world), "sum"), "the all-reduce after it")

    def test_all_reduce(self, world, device, async_ops):
        tensors = [mine(world.rank), mine(world.rank, numel=7)]
        self.collect(device, async_ops, [lambda t=t: dist.all_reduce(t) for t in tensors])
        wanted = [reduced(parts(world), "sum"), reduced(parts(world, numel=7), "sum")]
        same(world, torch.cat(tensors), torch.cat(wanted))
        self.after(world)

    def test_all_gather_into_tensor(self, world, device, async_ops):
        got = [torch.zeros(5 * world.size), torch.zeros(7 * world.size)]
        given = [mine(world.rank), mine(world.rank, numel=7)]
        calls = [
            lambda o=o, i=i: dist.all_gather_into_tensor(o, i)
            for o, i in zip(got, given, strict=True)
        ]
        self.collect(device, async_ops, calls)
        same(world, torch.cat(got), torch.cat([*parts(world), *parts(world, numel=7)]))
        self.after(world)

    def test_reduce_scatter_tensor(self, world, device, async_ops):
        got = [torch.zeros(5), torch.zeros(7)]
        given = [mine(world.rank).repeat(world.size), mine(world.rank, numel=7).repeat(world.size)]
        calls = [
            lambda o=o, i=i: dist.reduce_scatter_tensor(o, i)
            for o, i in zip(got, given, strict=True)
        ]
        self.collect(device, async_ops, calls)
        wanted = [reduced(parts(world), "sum"), reduced(parts(world, numel=7), "sum")]
        same(world, torch.cat(got), torch.cat(wanted))
        self.after(world)

    def test_an_empty_block_leaves_the_group_usable(self, world, device, async_ops):
        with _coalescing_manager(device=device, async_ops=async_ops):
            pass
        self.after(world)


@pytest.mark.parametrize("async_ops", [False, True])
def test_the_coalescing_manager_waits_for_messages(world, async_ops):
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got, reduced_too = torch.zeros(1 << 20), mine(world.rank)
    dist.barrier()
    if world.rank == world.size - 1:
        time.sleep(0.2)
    # With a device, or the messages are no part of torch's batch.
    with _coalescing_manager(device=torch.device("cpu"), async_ops=async_ops) as manager:
        dist.irecv(got, before)
        dist.all_reduce(reduced_too)
        dist.isend(torch.full((1 << 20,), world.rank + 5.0), after)
    if async_ops:
        manager.wait()
    same(world, got, torch.full((1 << 20,), before + 5.0), "message")
    same(world, reduced_too, reduced(parts(world), "sum"), "sum")


@pytest.mark.mpi(min_size=2)
def test_a_batch_past_the_groups_timeout_withdraws_its_receives(world):
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    lost, got = torch.zeros(4), torch.zeros(4)
    if world.rank == 0:
        with pytest.raises(CommTimeout), _coalescing_manager(group, torch.device("cpu")):
            dist.irecv(lost, 1, group)
    dist.barrier()
    if world.rank < 2:
        dist.send(torch.ones(4), 0, group) if world.rank else dist.recv(got, 1, group)
    ok = world.rank != 0 or (lost.tolist() == [0] * 4 and got.tolist() == [1] * 4)
    agree(world, ok, f"{lost} {got}")
    dist.destroy_process_group(group)


def test_functional_collectives(world):
    group = dist.group.WORLD
    given = mine(world.rank)
    same(
        world,
        functional.all_reduce(given, "sum", group).wait(),
        reduced(parts(world), "sum"),
        "all_reduce",
    )
    same(world, given, mine(world.rank), "all_reduce's argument")
    same(world, functional.all_reduce(given, "avg", group) + 0, reduced(parts(world), "avg"), "avg")
    gathered = functional.all_gather_tensor(given, 0, group)
    same(world, gathered + 0, torch.cat(parts(world)), "all_gather_tensor")
    scattered = functional.reduce_scatter_tensor(given.repeat(world.size), "sum", 0, group)
    same(world, scattered + 0, reduced(parts(world), "sum"), "reduce_scatter_tensor")
    sizes = [rank + 1 for rank in range(world.size)]  # what everyone sends to each rank
    swapped = functional.all_to_all_single(
        torch.full((sum(sizes),), float(world.rank)), [world.rank + 1] * world.size, sizes, group
    )
    wanted = torch.arange(float(world.size)).repeat_interleave(world.rank + 1)
    same(world, swapped + 0, wanted, "all_to_all_single")
    root = world.size - 1
    same(world, functional.broadcast(given, root, group) + 0, mine(root), "broadcast")
    both = functional.all_reduce_coalesced([given, given * 2], "sum", group)
    total = reduced(parts(world), "sum")
    same(
        world,
        torch.cat([one + 0 for one in both]),
        torch.cat([total, 2 * total]),
        "all_reduce_coalesced",
    )


def test_functional_collectives_that_autograd_sees(world):
    given = mine(world.rank).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(given, 0, dist.group.WORLD)
    weights = torch.arange(5.0 * world.size)
    (gathered * weights).sum().backward()
    same(world, given.grad, world.size * weights[5 * world.rank : 5 * world.rank + 5])
