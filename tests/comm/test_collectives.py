"""Collectives that move data: dtypes, uneven and empty parts, strided tensors, large counts."""

import time
import warnings
from pathlib import Path

import pytest
import torch

from mpidist.comm.algorithms import movement
from mpidist.comm.memory import buffer
from mpidist.errors import MpidistError
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint64, torch.int8, torch.int64,
    torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 13)]


def value(rank, shape, dtype):
    """Return the contribution of a rank: different on all ranks, exact in every dtype."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 7 + rank * 3) % 11).view(shape).to(dtype)


def same(a, b):
    return a.shape == b.shape and a.dtype is b.dtype and bytes_of(a) == bytes_of(b)


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("async_op", [False, True])
def test_every_dtype_moves(group, dtype, async_op):
    W, rank = group.size, group.rank
    wrong = []

    def ended(work):
        if async_op:
            work.wait()

    for shape in SHAPES:
        mine = value(rank, shape, dtype)
        for root in range(W):
            tensor = mine.clone()
            ended(group.broadcast(tensor, root, async_op=async_op))
            if not same(tensor, value(root, shape, dtype)):
                wrong.append(("broadcast", shape, root))
            outs = [torch.zeros_like(mine) for _ in range(W)] if rank == root else None
            ended(group.gather(mine, outs, root, async_op=async_op))
            if outs and not all(same(outs[r], value(r, shape, dtype)) for r in range(W)):
                wrong.append(("gather", shape, root))
            parts = [value(r + 5, shape, dtype) for r in range(W)] if rank == root else None
            target = torch.zeros_like(mine)
            ended(group.scatter(target, parts, root, async_op=async_op))
            if not same(target, value(rank + 5, shape, dtype)):
                wrong.append(("scatter", shape, root))
        outs = [torch.zeros_like(mine) for _ in range(W)]
        ended(group.all_gather(outs, mine, async_op=async_op))
        if not all(same(outs[r], value(r, shape, dtype)) for r in range(W)):
            wrong.append(("all_gather", shape))
        flat = torch.zeros((W, *shape), dtype=torch.uint8).to(dtype)
        ended(group.all_gather_into_tensor(flat, mine, async_op=async_op))
        if not all(same(flat[r], value(r, shape, dtype)) for r in range(W)):
            wrong.append(("all_gather_into_tensor", shape))
        inputs = [value(rank * W + r, shape, dtype) for r in range(W)]
        outs = [torch.zeros_like(mine) for _ in range(W)]
        ended(group.all_to_all(outs, inputs, async_op=async_op))
        if not all(same(outs[r], value(r * W + rank, shape, dtype)) for r in range(W)):
            wrong.append(("all_to_all", shape))
    agree(group, not wrong, str(wrong))


@pytest.mark.parametrize("numel", [3, 40_000])
def test_ragged_all_gather(group, numel):
    sizes = [numel * r for r in range(group.size)]  # rank 0 contributes nothing
    outs = [torch.zeros(n) for n in sizes]
    group.all_gather(outs, torch.full((sizes[group.rank],), float(group.rank)))
    agree(group, all((outs[r] == r).all() for r in range(group.size)))


def test_large_lists_go_from_and_to_their_own_memory(group):
    numel = movement.FLAT_BYTES  # floats, so four times over the limit
    W, rank = group.size, group.rank
    outs = [torch.zeros(numel) for _ in range(W)]
    group.all_gather(outs, torch.full((numel,), float(rank)))
    ok = all((outs[r] == r).all() for r in range(W))
    for root in range(W):
        group.gather(torch.full((numel,), 10.0 + rank), outs if rank == root else None, root)
        ok &= rank != root or all((outs[r] == 10 + r).all() for r in range(W))
        target = torch.zeros(numel)
        group.scatter(
            target,
            [torch.full((numel,), 20.0 + r) for r in range(W)] if rank == root else None,
            root,
        )
        ok &= bool((target == 20 + rank).all())
    agree(group, ok)


def test_lists_that_are_chunks_of_one_tensor(group):
    W, rank = group.size, group.rank
    for numel in (5, 40_000):
        whole = torch.zeros(W, numel)
        group.all_gather(list(whole), torch.full((numel,), float(rank)))
        agree(group, bool((whole == torch.arange(W)[:, None]).all()), f"{numel}")
        # One rank's list is contiguous and the others' are not; all ranks must choose the same
        # algorithm.
        outs = list(torch.zeros(W, numel)) if rank == 0 else [torch.zeros(numel) for _ in range(W)]
        group.all_gather(outs, torch.full((numel,), float(rank)))
        agree(group, all((outs[r] == r).all() for r in range(W)), f"mixed {numel}")


def test_gathering_into_the_tensor_that_holds_the_own_part(group):
    whole = torch.zeros(group.size, 6)
    whole[group.rank] = group.rank + 1
    group.all_gather_into_tensor(whole, whole[group.rank])
    agree(group, bool((whole == torch.arange(1, group.size + 1)[:, None]).all()))


@pytest.mark.parametrize("width", [1, 3])
def test_uneven_all_to_all_single(group, width):
    W, rank = group.size, group.rank
    sends = [(rank + to) % 3 for to in range(W)]
    receives = [(source + rank) % 3 for source in range(W)]
    source = torch.cat([torch.full((n, width), 100.0 * rank + to) for to, n in enumerate(sends)])
    target = torch.zeros(sum(receives), width)
    group.all_to_all_single(target, source, receives, sends)
    expected = torch.cat([torch.full((n, width), 100.0 * r + rank) for r, n in enumerate(receives)])
    agree(group, torch.equal(target, expected))
    even_in, even_out = torch.full((2 * W, width), float(rank)), torch.zeros(2 * W, width)
    group.all_to_all_single(even_out, even_in)
    agree(
        group,
        torch.equal(
            even_out, torch.arange(W).repeat_interleave(2)[:, None].expand(-1, width).float()
        ),
    )


def test_strided_and_expanded_tensors(group):
    W, rank = group.size, group.rank
    transposed = torch.zeros(4, 3).t() + rank
    group.broadcast(transposed, W - 1)
    sliced = torch.zeros(3, 10)[:, ::2]
    outs = [torch.zeros(5, 3).t() for _ in range(W)]
    group.all_gather(outs, sliced + rank)
    wide = torch.full((1, 1), float(rank)).expand(4, 2)
    group.broadcast(wide, 0)
    agree(
        group,
        bool((transposed == W - 1).all())
        and all((outs[r] == r).all() for r in range(W))
        and bool((wide == 0).all()),
    )


def test_one_rank_counts_in_larger_units_than_the_others(group, monkeypatch):
    """The other ranks do not know which rank has more bytes than MPI can count."""
    if group.rank == 0:
        monkeypatch.setattr(buffer, "MAX_COUNT", 200)
    rows = [1 + (group.rank + to) % 3 for to in range(group.size)]  # as many as come back
    source = torch.cat([torch.full((n, 25), 10.0 * group.rank + to) for to, n in enumerate(rows)])
    target = torch.zeros(sum(rows), 25)
    group.all_to_all_single(target, source, rows, rows)
    wanted = torch.cat(
        [torch.full((n, 25), 10.0 * source_rank + group.rank) for source_rank, n in enumerate(rows)]
    )
    agree(group, torch.equal(target, wanted), str(target[:, 0]))


def test_counts_past_the_limit_of_mpi(group, monkeypatch):
    """The code for 2**31 bytes, with a limit low enough for a test."""
    monkeypatch.setattr(buffer, "MAX_COUNT", 40)
    W, rank = group.size, group.rank
    big = torch.full((101,), float(rank))
    group.broadcast(big, W - 1)
    ok = bool((big == W - 1).all())
    outs = torch.zeros(W, 101)
    group.all_gather_into_tensor(outs, torch.full((101,), float(rank)))
    ok &= bool((outs == torch.arange(W)[:, None]).all())
    target = torch.zeros(W, 33)
    group.all_to_all_single(target, torch.full((W, 33), float(rank)))
    ok &= bool((target == torch.arange(W)[:, None]).all())
    monkeypatch.setattr(movement, "FLAT_BYTES", 16)
    parts = [torch.zeros(101) for _ in range(W)]
    group.all_gather(parts, torch.full((101,), float(rank)))
    ok &= all((parts[r] == r).all() for r in range(W))
    group.gather(torch.full((101,), 5.0 + rank), parts if rank == 0 else None, 0)
    ok &= rank != 0 or all((parts[r] == 5 + r).all() for r in range(W))
    agree(group, ok)


def test_broadcast_coalesced(group):
    tensors = [torch.full((n,), float(group.rank)) for n in (0, 1, 5, 100)]
    group.broadcast_coalesced(tensors, group.size - 1)
    agree(group, all((t == group.size - 1).all() for t in tensors))


def test_async_results_and_futures(group):
    tensor = torch.full((3,), float(group.rank))
    work = group.broadcast(tensor, 0, async_op=True)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2)
    assert work.wait() and work.is_completed() and work.exception() is None
    assert work.result()[0] is tensor and work.source_rank() == -1
    agree(group, bool((doubled.wait(60) == 0).all()))


def test_a_barrier_waits_for_the_slowest(group, tmp_path):
    sign = Path(group.broadcast_object(str(tmp_path / "sign"), 0))
    if group.rank == group.size - 1:
        time.sleep(0.1)  # the others are in the barrier by now
        sign.touch()
    group.barrier()
    agree(group, sign.exists(), "left the barrier before the last rank came")


@pytest.mark.parametrize("numel", [3, 40_000])
def test_lists_that_hold_the_own_part_already(group, numel):
    whole = torch.zeros(group.size, numel)
    whole[group.rank] = group.rank + 1.0
    group.all_gather(list(whole), whole[group.rank])
    agree(
        group, torch.equal(whole, torch.arange(1.0, group.size + 1).view(-1, 1).expand(-1, numel))
    )


def test_a_traced_collective_is_refused_also_where_it_has_run_before(group):
    def summed(x):
        y = x * 2
        group.all_reduce(y)
        return y

    def gathered(x):
        rows = [torch.zeros_like(x) for _ in range(group.size)]
        group.all_gather(rows, x)
        return torch.cat(rows)

    x = torch.ones(2, 3)
    for function in (summed, gathered):
        for _ in range(3):
            function(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of each number that it reads
            raises_on_all(
                group,
                MpidistError,
                lambda function=function: torch.jit.trace(function, (x,), check_trace=False),
                "was called within torch.jit.trace",
            )
