"""Pairwise reductions of host tensors: each rank reduces one shard."""

import itertools

import pytest
import torch

from mpidist.comm.algorithms import pairwise
from mpidist.comm.algorithms.reduce_op import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    PremulSum,
)
from mpidist.comm.memory import buffer
from tests.comm.algorithms.test_reductions import part
from tests.tools.support import agree, reduced

pytestmark = pytest.mark.mpi


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


def test_shard_bounds_cut_evenly():
    for size in range(1, 9):
        for numel in (0, 1, 7, 8, 1000):
            bounds = pairwise.shard_bounds(numel, size)
            lengths = [b - a for a, b in itertools.pairwise(bounds)]
            assert bounds[0] == 0 and bounds[-1] == numel and max(lengths) - min(lengths) <= 1


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
