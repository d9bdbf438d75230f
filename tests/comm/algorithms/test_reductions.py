"""Reductions of every dtype and operation against NumPy, at sizes around algorithms' limits."""

import itertools

import pytest
import torch

from mpidist.comm.algorithms.reduce_op import (
    AVG,
    BAND,
    BOR,
    BXOR,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    PremulSum,
)
from mpidist.comm.memory import buffer
from tests.tools.support import agree, reduced

pytestmark = pytest.mark.mpi

INTEGERS = [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OPERATIONS = {
    **dict.fromkeys(INTEGERS, (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)),
    **dict.fromkeys(FLOATS, (SUM, AVG, PRODUCT, MIN, MAX)),
    **dict.fromkeys((torch.complex64, torch.complex128), (SUM, AVG, PRODUCT)),
    torch.bool: (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR),
}


def part(rank, shape, dtype):
    """Return a rank's contribution: small numbers, exact in sums and products of all dtypes."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randint(0 if not dtype.is_signed else -2, 3, shape, generator=generator)
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", OPERATIONS, ids=lambda x: str(x).replace("torch.", ""))
def test_every_dtype_and_operation(group, dtype):
    W, rank = group.size, group.rank
    wrong = []
    for op, shape in itertools.product(OPERATIONS[dtype], [(), (0,), (1,), (5, 13), (70_001,)]):
        parts = [part(r, shape, dtype) for r in range(W)]
        expected = reduced(parts, op)
        tensor = parts[rank].clone()
        group.all_reduce(tensor, op)
        if not torch.equal(tensor, expected):
            wrong.append(("all_reduce", op, shape, tensor.flatten()[:5], expected.flatten()[:5]))
        tensor = parts[rank].clone()
        group.reduce(tensor, W - 1, op)
        if not torch.equal(tensor, expected if rank == W - 1 else parts[rank]):
            wrong.append(("reduce", op, shape))
        flat = torch.stack(parts)  # the same on all ranks: reduce W copies, keep the own row
        rows = [reduced([row] * W, op) for row in parts]
        target = torch.empty_like(parts[rank])
        group.reduce_scatter_tensor(target, flat, op)
        if not torch.equal(target, rows[rank]):
            wrong.append(("reduce_scatter_tensor", op, shape))
        target = torch.empty_like(parts[rank])
        group.reduce_scatter(target, parts, op)
        if not torch.equal(target, rows[rank]) or not torch.equal(flat, torch.stack(parts)):
            wrong.append(("reduce_scatter", op, shape))
    agree(group, not wrong, str(wrong))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str
)
def test_premul_sum_multiplies_before_the_sum(group, dtype):
    factor = group.rank + 2
    tensor = torch.full((11,), 3).to(dtype)
    group.all_reduce(tensor, PremulSum(factor))
    total = 3 * sum(r + 2 for r in range(group.size))
    kept = torch.full((11,), 3).to(dtype)
    group.reduce(kept, 0, PremulSum(factor))
    scattered = torch.zeros(4).to(dtype)
    source = torch.full((4 * group.size,), 3).to(dtype)
    group.reduce_scatter_tensor(scattered, source, PremulSum(factor))
    ok = bool((tensor == total).all() and (scattered == total).all() and (source == 3).all())
    ok &= bool((kept == (total if group.rank == 0 else 3)).all())
    agree(group, ok, f"{tensor} {kept} {scattered} {source}")


def test_counts_past_the_limit_of_mpi(group, monkeypatch):
    monkeypatch.setattr(buffer, "MAX_COUNT", 17)
    W = group.size
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.arange(101).to(dtype)
        group.all_reduce(tensor, AVG)
        kept = torch.arange(101).to(dtype)
        group.reduce(kept, 0, MAX)
        target = torch.zeros(33).to(dtype)
        group.reduce_scatter_tensor(target, torch.ones(33 * W).to(dtype))
        expected = torch.arange(101).to(dtype)
        agree(
            group,
            torch.equal(tensor, expected)
            and torch.equal(kept, expected)
            and bool((target == W).all()),
            str(dtype),
        )


def test_strided_and_expanded_tensors(group):
    W = group.size
    strided = torch.ones(3, 8)[:, ::2]
    transposed = torch.ones(4, 3).t()
    wide = torch.ones(3, 1).expand(3, 5)
    for tensor in (strided, transposed, wide):
        group.all_reduce(tensor)
    agree(group, all(bool((t == W).all()) for t in (strided, transposed, wide)))
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    group.all_reduce(conjugate)
    agree(
        group,
        torch.equal(
            conjugate.resolve_conj(),
            torch.complex(torch.full((3,), float(W)), torch.full((3,), -float(W))),
        ),
    )


def test_coalesced_tensors_are_reduced_as_single_ones(group):
    tensors = [torch.full((n,), float(group.rank + 1)) for n in (0, 1, 17, 30_000, 5)]
    group.all_reduce_coalesced(tensors)
    total = group.size * (group.size + 1) / 2
    agree(group, all((t == total).all() for t in tensors))
    outs = [torch.zeros(4), torch.zeros(2, 3)]
    ins = [torch.ones(4 * group.size), torch.ones(2 * group.size, 3)]
    group.reduce_scatter_tensor_coalesced(outs, ins)
    gathered = [torch.zeros(4 * group.size), torch.zeros(2 * group.size, 3)]
    group.all_gather_into_tensor_coalesced(gathered, outs)
    agree(group, all((t == group.size).all() for t in gathered))


def test_reduce_scatter_into_its_own_input(group):
    flat = torch.arange(4.0 * group.size)
    expected = flat.view(group.size, 4)[group.rank].clone() * group.size
    own = flat.view(group.size, 4)[group.rank]
    group.reduce_scatter_tensor(own, flat)
    agree(group, torch.equal(own, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [10, 5_000, 100_000])
def test_sync_and_async_match_each_other(group, dtype, numel):
    for turn in range(60):
        tensor = torch.full((numel,), float(turn)).to(dtype)
        if (turn + group.rank) % 2:
            work = group.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
        else:
            assert group.all_reduce(tensor) is None
        agree(group, bool((tensor == turn * group.size).all()), f"turn {turn}")


@pytest.mark.parametrize("op", [SUM, MAX])
def test_negated_views_are_reduced_by_value(group, op):
    values = torch.tensor([1.0 + group.rank, 5.0 - group.rank])
    view = torch._neg_view(values.clone())
    group.all_reduce(view, op)
    parts = [-torch.tensor([1.0 + r, 5.0 - r]) for r in range(group.size)]
    agree(group, torch.equal(view.resolve_neg(), reduced(parts, op)), str(view))


def test_negated_views_of_one_rank_alone(group):
    own = torch.tensor([3 + 4j]).conj().imag if group.rank == 0 else torch.tensor([-4.0])
    group.all_reduce(own)
    agree(group, own.item() == -4.0 * group.size, str(own))
    large = torch._neg_view(torch.full((5 << 20,), group.rank + 1.0))
    group.all_reduce(large)
    agree(group, bool((large == -group.size * (group.size + 1) / 2).all()))
