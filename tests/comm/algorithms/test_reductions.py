"""Reductions of every dtype and operation against NumPy, at sizes around algorithms' limits."""

import itertools

import pytest
import torch

from mpidist.comm.algorithms import low_precision, pairwise
from mpidist.comm.algorithms.reduce_op import (
    ACCUMULATES_IN,
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


@pytest.mark.parametrize("dtype", [d for d in ACCUMULATES_IN if d is not torch.complex32], ids=str)
@pytest.mark.parametrize("numel", [3, 5_000, 100_003, 700_001])
def test_narrow_types_accumulate_in_fp32_with_the_same_bits_everywhere(group, dtype, numel):
    def mine(rank):
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)

    parts = [mine(r) for r in range(group.size)]
    total = torch.zeros(numel)
    for other in parts:
        total += other.float()
    tensor = mine(group.rank)
    group.all_reduce(tensor)
    bits = tensor.view(torch.uint8).numpy().tobytes()
    everywhere = group.all_gather_object(hash(bits) if group.size == 1 else bits)
    if group.size <= 2 or numel > low_precision.WIDEN_NUMEL:
        ok = torch.equal(tensor, total.to(dtype))  # in rank order and rounded once
    else:
        # MPI adds the widened numbers in another order: an ulp of fp32 may change the rounding.
        ok = bool(
            (
                (tensor.float() - total).abs() <= total.abs() * torch.finfo(dtype).eps * 2 + 1e-6
            ).all()
        )
    agree(group, ok)
    assert len(set(everywhere)) == 1


def test_a_mean_of_large_halves_does_not_overflow(group):
    for numel in (4, 200_000):
        tensor = torch.full((numel,), 60_000.0, dtype=torch.float16)
        group.all_reduce(tensor, AVG)
        agree(group, bool((tensor == 60_000).all()), f"{numel}: {tensor[:3]}")


def test_half_types_are_summed_in_fp32(group):
    # 2048 + 1 is 2048 in fp16; in fp32 the ones are not lost.
    tensor = torch.full((100_000,), 2048.0 if group.rank == 0 else 1.0, dtype=torch.float16)
    group.all_reduce(tensor)
    expected = torch.tensor(2048.0 + (group.size - 1)).half()
    agree(group, bool((tensor == expected).all()), f"{tensor[:3]} != {expected}")


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


def test_large_tensors_are_reduced_by_shards(group, monkeypatch):
    monkeypatch.setattr(pairwise, "FROM_BYTES", 64)
    monkeypatch.setattr(pairwise, "CHUNK_BYTES", 40)
    for numel in (16, 17, 101):
        for op in (SUM, AVG, PRODUCT, MIN, MAX):
            for dtype in (torch.float32, torch.int32, torch.bfloat16):
                parts = [part(r, (numel,), dtype) for r in range(group.size)]
                tensor = parts[group.rank].clone()
                group.all_reduce(tensor.requires_grad_(False), op)
                agree(group, torch.equal(tensor, reduced(parts, op)), f"{numel} {op} {dtype}")
                root, own = numel % group.size, parts[group.rank]
                tensor = own.clone()
                group.reduce(tensor, root, op)
                wanted = reduced(parts, op) if group.rank == root else own
                agree(group, torch.equal(tensor, wanted), f"reduce {numel} {op} {dtype}")


def test_shards_add_up_in_rank_order(group, monkeypatch):
    """Bits are those of a loop over the ranks, on every rank."""
    monkeypatch.setattr(pairwise, "FROM_BYTES", 64)
    parts = [
        torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(group.size)
    ]
    expected = parts[0].clone()
    for other in parts[1:]:
        expected += other
    tensor = parts[group.rank].clone()
    group.all_reduce(tensor)
    agree(group, torch.equal(tensor, expected))


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


def test_shard_bounds_cut_evenly():
    for size in range(1, 9):
        for numel in (0, 1, 7, 8, 1000):
            bounds = pairwise.shard_bounds(numel, size)
            lengths = [b - a for a, b in itertools.pairwise(bounds)]
            assert bounds[0] == 0 and bounds[-1] == numel and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [3, 5_000, 200_000])
def test_the_fast_path_writes_below_autograd(group, dtype, numel):
    leaf = torch.ones(numel, dtype=dtype, requires_grad=True)
    group.all_reduce(leaf.detach())  # prepares the fast path
    outcome = group.all_reduce_at_once(leaf, SUM)
    value = float(group.size**2) if outcome else float(group.size)
    agree(
        group,
        leaf.is_leaf and leaf.grad_fn is None and bool((leaf == value).all()),
        f"{outcome} {leaf}",
    )


@pytest.mark.parametrize("op", [SUM, MAX])
def test_negated_views_are_reduced_by_value(group, op):
    values = torch.tensor([1.0 + group.rank, 5.0 - group.rank])
    view = torch._neg_view(values.clone())
    group.all_reduce(view, op)
    parts = [-torch.tensor([1.0 + r, 5.0 - r]) for r in range(group.size)]
    agree(group, torch.equal(view.resolve_neg(), reduced(parts, op)), str(view))


def test_the_fast_path_notices_reused_memory(group):
    whole = torch.ones(8)
    for view, op, expected in [
        (whole[:4], SUM, group.size),
        (whole[:2], SUM, group.size**2),
        (whole[:2].view(torch.int32), MAX, None),
        (whole[:4], MAX, None),
        (whole[:4].view(2, 2).t(), SUM, None),
    ]:
        before = view.clone()
        group.all_reduce(view, op)
        wanted = (
            torch.full_like(before, expected)
            if expected
            else before * group.size
            if op == SUM
            else before
        )
        agree(group, torch.equal(view, wanted), f"{view} {wanted}")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("op", [MIN, MAX])
def test_nan_wins_and_zeros_are_ordered(group, dtype, op):
    """MPI leaves both undefined; here all ranks hold the same bits, and NaN wins."""
    W = group.size
    for numel in (1, 6, 70_001):
        parts = [part(r, (numel,), torch.float32) for r in range(W)]
        for r in range(W):
            parts[r][r % numel :: 7] = float("nan")
        parts = [p.to(dtype) for p in parts]
        expected = reduced([p.float() for p in parts], op)
        tensor = parts[group.rank].clone()
        group.all_reduce(tensor, op)
        agree(
            group,
            torch.equal(tensor.float().nan_to_num(99), expected.nan_to_num(99)),
            f"all_reduce {numel}",
        )
        kept = parts[group.rank].clone()
        group.reduce(kept, 0, op)
        wanted = expected if group.rank == 0 else parts[group.rank].float()
        agree(
            group,
            torch.equal(kept.float().nan_to_num(99), wanted.nan_to_num(99)),
            f"reduce {numel}",
        )
        target = torch.empty(numel, dtype=dtype)
        group.reduce_scatter_tensor(target, parts[group.rank].repeat(W), op)
        agree(
            group,
            torch.equal(target.float().nan_to_num(99), expected.nan_to_num(99)),
            f"reduce_scatter {numel}",
        )
    zero = torch.tensor([0.0 if group.rank == 0 else -0.0]).to(dtype)
    group.all_reduce(zero, op)
    negative = bool(torch.signbit(zero.float()))
    agree(group, negative == (op == MIN and group.size > 1), f"{zero}")


def test_negated_views_of_one_rank_alone(group):
    own = torch.tensor([3 + 4j]).conj().imag if group.rank == 0 else torch.tensor([-4.0])
    group.all_reduce(own)
    agree(group, own.item() == -4.0 * group.size, str(own))
    large = torch._neg_view(torch.full((5 << 20,), group.rank + 1.0))
    group.all_reduce(large)
    agree(group, bool((large == -group.size * (group.size + 1) / 2).all()))


def test_premul_sum_of_narrow_types_rounds_once(group):
    """Products are not rounded before the sum, in all_reduce, reduce and reduce_scatter."""
    factor = 1 / 3
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        parts = [
            part(r, (600 * group.size,), torch.float32).div(7).to(dtype) for r in range(group.size)
        ]
        total = sum(p.double() * factor for p in parts)
        mine = parts[group.rank]
        tensor, kept, scattered = mine.clone(), mine.clone(), torch.zeros(600).to(dtype)
        group.all_reduce(tensor, PremulSum(factor))
        group.reduce(kept, 0, PremulSum(factor))
        group.reduce_scatter_tensor(scattered, mine, PremulSum(factor))
        listed = torch.zeros(600).to(dtype)
        group.reduce_scatter(listed, list(mine.split(600)), PremulSum(factor))
        own = slice(600 * group.rank, 600 * (group.rank + 1))

        def is_rounded_once(got, exact, dtype=dtype):
            # MPI adds the fp32 products in another order, and terms may cancel.
            limit = (
                exact.abs() * torch.finfo(dtype).eps * 0.501
                + torch.finfo(dtype).smallest_normal
                + 1e-6
            )
            return bool(((got.double() - exact).abs() <= limit).all())

        ok = (
            is_rounded_once(tensor, total)
            and is_rounded_once(scattered, total[own])
            and is_rounded_once(listed, total[own])
        )
        ok &= (
            is_rounded_once(kept, total)
            if group.rank == 0
            else torch.equal(kept.float(), mine.float())
        )
        agree(group, ok, f"{dtype}")


def test_reduce_scatter_of_pieces_of_different_sizes(group, monkeypatch):
    sizes = [(3 * r) % 7 * 400 for r in range(group.size)]  # the first is empty
    for limit in (1 << 30, 500):
        monkeypatch.setattr(buffer, "MAX_COUNT", limit)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            for op in (SUM, MAX, PremulSum(2)) if dtype is not torch.bool else (SUM,):
                parts = [
                    [part(r * 10 + i, (n,), dtype) for i, n in enumerate(sizes)]
                    for r in range(group.size)
                ]
                output = torch.zeros(sizes[group.rank]).to(dtype)
                group.reduce_scatter(output, parts[group.rank], op)
                mine = [row[group.rank] for row in parts]
                expected = (
                    reduced([p * 2 for p in mine], "sum")
                    if isinstance(op, PremulSum)
                    else reduced(mine, op)
                )
                agree(
                    group,
                    torch.equal(output, expected),
                    f"{limit} {dtype} {op}: {output[:4]} {expected[:4]}",
                )
