"""Sums and products of integers past their range: modulo 2**bits with every MPI library."""

import pytest
import torch

from mpidist.comm import AVG, PRODUCT, SUM, PremulSum
from mpidist.comm.algorithms import pairwise
from mpidist.comm.memory import buffer
from tests.tools.simulated_nodes import lay_out
from tests.tools.support import agree, finished

pytestmark = pytest.mark.mpi

DTYPES = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]
# Vector instructions work on 16 or 32 bytes, and scalar ones on the rest; the longest tensor is no
# eager message.
NUMELS = (1, 8, 16, 33, 1000, 70_001)
FACTOR = 3

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).replace("torch.", ""))


def part(rank, numel, dtype):
    """Return a rank's contribution: random numbers, then the least, then the greatest number."""
    limits = torch.iinfo(dtype)
    bits = torch.randint(0, 1 << 32, (numel,), generator=torch.Generator().manual_seed(rank))
    numbers = bits.to(dtype) if limits.bits < 64 else bits * bits
    numbers[numel // 3 : numel // 2] = limits.min
    numbers[numel // 2 :: 2] = limits.max
    return numbers


def computed_by_torch(parts, op):
    """Reduce contributions in int64, which wraps around, then keep the bits of their dtype."""
    total = parts[0].to(torch.int64)
    for other in parts[1:]:
        total = total * other.to(torch.int64) if op == PRODUCT else total + other.to(torch.int64)
    if isinstance(op, PremulSum):
        total = total * op.factor
    total = total.to(parts[0].dtype)
    if op == AVG:
        total = torch.div(total.to(torch.int64), len(parts), rounding_mode="trunc").to(
            parts[0].dtype
        )
    return total


@each_dtype
def test_every_reduction_wraps_around(group, dtype):
    W, rank = group.size, group.rank
    wrong = []

    def check(what, got, expected):
        if not torch.equal(got, expected):
            place = int((got != expected).flatten().to(torch.uint8).argmax())
            wrong.append(
                (
                    what,
                    op,
                    numel,
                    place,
                    got.flatten()[place].item(),
                    expected.flatten()[place].item(),
                )
            )

    for op in (SUM, AVG, PRODUCT, PremulSum(FACTOR)):
        for numel in NUMELS:
            parts = [part(r, numel, dtype) for r in range(W)]
            mine, expected = parts[rank], computed_by_torch(parts, op)
            rows = [part(r, numel * W, dtype) for r in range(W)]
            own = computed_by_torch([row[rank * numel : (rank + 1) * numel] for row in rows], op)
            for is_async in (False, True):
                tensor = mine.clone()
                finished(group.all_reduce(tensor, op, async_op=is_async))
                check(f"all_reduce, async {is_async}", tensor, expected)
                strided = torch.zeros(numel, 2, dtype=dtype)[:, 1].copy_(mine)
                finished(group.all_reduce(strided, op, async_op=is_async))
                check(f"all_reduce of a column, async {is_async}", strided, expected)
                several = [mine.clone(), mine.clone()]
                finished(group.all_reduce_coalesced(several, op, async_op=is_async))
                check(
                    "all_reduce_coalesced", torch.stack(several), torch.stack([expected, expected])
                )
                tensor = mine.clone()
                finished(group.reduce(tensor, W - 1, op, async_op=is_async))
                check("reduce", tensor, expected if rank == W - 1 else mine)
                target = torch.zeros(numel, dtype=dtype)
                finished(group.reduce_scatter_tensor(target, rows[rank], op, async_op=is_async))
                check("reduce_scatter_tensor", target, own)
                target = torch.zeros(numel, dtype=dtype)
                finished(
                    group.reduce_scatter(
                        target, list(rows[rank].split(numel)), op, async_op=is_async
                    )
                )
                check("reduce_scatter", target, own)
    agree(group, not wrong, str(wrong[:4]))


@each_dtype
def test_reduce_scatter_of_different_sizes_wraps_around(group, dtype):
    W, rank = group.size, group.rank
    sizes = [40 * place for place in range(W)]  # the first is empty
    rows = [part(r, sum(sizes), dtype) for r in range(W)]
    target = torch.zeros(sizes[rank], dtype=dtype)
    group.reduce_scatter(target, list(rows[rank].split(sizes)))
    start = sum(sizes[:rank])
    expected = computed_by_torch([row[start : start + sizes[rank]] for row in rows], SUM)
    agree(group, torch.equal(target, expected), f"{target[:4]} {expected[:4]}")


@each_dtype
def test_reductions_by_shards_and_in_pieces_wrap_around(group, dtype, monkeypatch):
    parts = [part(r, 1001, dtype) for r in range(group.size)]
    monkeypatch.setattr(pairwise, "CHUNK_BYTES", 400)
    for from_bytes, limit in ((64, 1 << 30), (1 << 30, 100)):
        monkeypatch.setattr(pairwise, "FROM_BYTES", from_bytes)
        monkeypatch.setattr(buffer, "MAX_COUNT", limit)
        # Prepared with other limits, for addresses that may differ by rank.
        group._fast_path.forget()
        for op in (SUM, AVG, PRODUCT):
            tensor, kept = parts[group.rank].clone(), parts[group.rank].clone()
            scattered = torch.zeros(1001, dtype=dtype)
            group.all_reduce(tensor, op)
            group.reduce(kept, 0, op)
            group.reduce_scatter_tensor(scattered, parts[group.rank].repeat(group.size), op)
            expected = computed_by_torch(parts, op)
            is_right = torch.equal(tensor, expected) and torch.equal(scattered, expected)
            is_right &= torch.equal(kept, expected if group.rank == 0 else parts[group.rank])
            agree(group, is_right, f"from {from_bytes}, at most {limit} {op}")


@each_dtype
def test_reductions_between_nodes_wrap_around(world, dtype, monkeypatch):
    """Non-blocking calls of MPI, which reduce in the thread that waits."""
    lay_out(world, monkeypatch, "alone")
    group = world.clone("far")
    for numel in (33, 70_001):
        parts = [part(r, numel, dtype) for r in range(group.size)]
        tensors = [parts[group.rank].clone() for _ in range(3)]
        works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        alone = parts[group.rank].clone()
        group.all_reduce(alone)
        expected = computed_by_torch(parts, SUM)
        agree(group, all(torch.equal(t, expected) for t in (*tensors, alone)), f"{numel}")
    group.close()


@pytest.mark.usefixtures("default_group")
def test_torchs_all_reduce_wraps_around(group):
    for dtype in DTYPES:
        parts = [part(r, 100, dtype) for r in range(group.size)]
        tensor = parts[group.rank].clone()
        torch.distributed.all_reduce(tensor)
        agree(group, torch.equal(tensor, computed_by_torch(parts, SUM)), f"{dtype}")
