"""Low-rank factors: what is a matrix, where its factors lie, and random values by a seed."""

from __future__ import annotations

import pytest
import torch

from mpidist.ddp.hooks import lowrank


def test_the_rank_is_at_most_the_shorter_side():
    assert [lowrank.rank_of(*case) for case in ((2, 9, 4), (9, 3, 4), (9, 9, 4))] == [2, 3, 4]


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "expected"),
    [
        ((12,), 1, 0, False),
        ((), 1, 0, False),
        ((0, 4), 1, 0, False),
        ((10, 10), 1, 2, True),  # 20 · 2 < 100
        ((10, 10), 1, 5, False),  # 20 · 5 = 100
        ((10, 10), 2, 2.4, True),
        ((10, 10), 2, 2.5, False),
        ((8, 3, 5, 5), 1, 7, True),  # 83 · 7 < 600
        ((8, 3, 5, 5), 1, 7.3, False),
        ((2, 100), 50, 0.9, True),  # of rank 2 at most
    ],
)
def test_a_matrix_is_compressed_if_it_becomes_smaller_by_the_rate(shape, rank, rate, expected):
    assert lowrank.is_compressible(shape, rank, rate) is expected


@pytest.mark.parametrize(
    ("gradient", "shape"),
    [
        (torch.rand(4, 6), (4, 6)),
        (torch.rand(6, 4).t(), (6, 4)),  # its transpose
        (torch.rand(8, 3, 5, 5), (8, 75)),
        (torch.rand(8, 3, 5, 5).to(memory_format=torch.channels_last), (8, 75)),
    ],
    ids=["matrix", "transposed", "convolution", "channels last"],
)
def test_a_matrix_is_a_contiguous_view_of_its_gradient(gradient, shape):
    matrix = lowrank.as_matrix(gradient)
    assert matrix.shape == shape and matrix.is_contiguous() and lowrank.is_matrix(gradient)
    assert matrix.data_ptr() == gradient.data_ptr()
    # The columns may be in another order, each row of the gradient stays one.
    rows = gradient.reshape(gradient.shape[0], -1)
    rows = rows.t() if matrix.shape[0] != rows.shape[0] else rows
    assert torch.equal(matrix.sort(1).values, rows.sort(1).values)


def test_a_gradient_with_gaps_is_no_matrix():
    for gradient in (torch.rand(4, 6)[:, ::2], torch.rand(8, 3, 5, 5)[..., :2]):
        assert not lowrank.is_matrix(gradient)
        with pytest.raises(RuntimeError):
            lowrank.as_matrix(gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_factors_lie_behind_what_is_sent_whole(dtype):
    matrices = [torch.rand(5, 7, dtype=dtype), torch.rand(2, 9, dtype=dtype)]
    whole = [torch.rand(3, dtype=dtype), torch.rand((), dtype=dtype)]
    errors = [torch.zeros_like(matrices[0]), None]
    named = list(zip("ab", matrices, errors, strict=True))
    factors = lowrank.place(named, whole, 3, errors={"a": errors[0]})
    first, second = factors.bucket.matrices
    assert factors.names == ("a", "b") and factors.errors == {"a": errors[0]}
    assert first.m is matrices[0] and first.e is errors[0] and second.e is None
    assert (first.p.shape, first.q.shape) == ((5, 3), (7, 3))
    assert (second.p.shape, second.q.shape) == ((2, 2), (9, 2))
    assert factors.flat_p.numel() == 4 + 5 * 3 + 2 * 2
    unit = 16 // dtype.itemsize
    assert factors.flat_q.numel() % unit == 0 and second.q.storage_offset() % unit == 0
    # Filled by views, no two overlap: each element of P is written once.
    for number, part in enumerate((factors.bucket.slots, first.p, second.p), 1):
        part += number
    assert factors.flat_p.tolist() == [1.0] * 4 + [2.0] * 15 + [3.0] * 4
    first.q.fill_(1), second.q.fill_(2)
    assert factors.flat_q.sum() == 7 * 3 + 9 * 2 * 2
    assert first.p.stride() == (1, 5) and first.q.stride() == (1, 7)


def test_random_values_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = lowrank.random_like(torch.empty(3, 4), "0 1 a")
    torch.manual_seed(2)
    assert torch.equal(lowrank.random_like(torch.empty(3, 4), "0 1 a"), first)
    assert not torch.equal(lowrank.random_like(torch.empty(3, 4), "0 1 b"), first)
    half = lowrank.random_like(torch.empty(3, 4, dtype=torch.float16), "0 1 a")
    assert torch.equal(half, first.half())
