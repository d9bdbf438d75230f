"""Gradients as matrices, and their approximation by two thin ones: pure torch, no communication.

Letters: n × m a matrix; r the approximation's rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass
class Matrix:
    """One gradient as a matrix, and its thin ones."""

    name: str
    m: Tensor  # n × m, a view of the bucket
    p: Tensor  # n × r, a view of the flat memory of all
    q: Tensor  # m × r, the same


def rank_of(n: int, columns: int, wanted: int) -> int:
    """Return r: no matrix has a higher rank than its shorter side."""
    return min(n, columns, wanted)


def is_worth_it(shape: Sequence[int], rank: int, least_rate: float) -> bool:
    """Say whether a gradient is a matrix that shrinks by more than ``least_rate`` at this rank.

    Source:
        torch's ``_should_compress``.
    """
    if len(shape) < 2 or 0 in shape:
        return False
    n, columns = shape[0], torch.Size(shape[1:]).numel()
    return (n + columns) * rank_of(n, columns, rank) * least_rate < n * columns


def is_matrix(gradient: Tensor) -> bool:
    """Say whether ``as_matrix`` can be had of a gradient's layout."""
    try:
        as_matrix(gradient)
    except RuntimeError:  # no view of it is a matrix, and a copy would not bring the result home
        return False
    return True


def as_matrix(gradient: Tensor) -> Tensor:
    """Return a view of a gradient as n × m, its first dimension by the others.

    Raises:
        RuntimeError: Its layout allows none.
    """
    # A permuted layout (channels last) is a matrix, too: its columns in another order.
    order = sorted(range(1, gradient.dim()), key=gradient.stride, reverse=True)
    return gradient.permute(0, *order).view(gradient.shape[0], -1)


def place(matrices: Iterable[tuple[str, Tensor]], wanted_rank: int) -> tuple[list[Matrix], Tensor, Tensor]:
    """Give each named matrix its P and Q within two flat tensors, which travel as one each.

    Returns:
        The matrices, the flat Ps (sum of n · r elements), the flat Qs (sum of m · r).
    """
    named = [(name, m, rank_of(m.shape[0], m.shape[1], wanted_rank)) for name, m in matrices]
    like = named[0][1]
    flat_p = like.new_empty(sum(m.shape[0] * rank for _, m, rank in named))
    flat_q = like.new_empty(sum(m.shape[1] * rank for _, m, rank in named))
    placed, at_p, at_q = [], 0, 0
    for name, m, rank in named:
        (n, columns) = m.shape
        # Column by column: BLAS multiplies a large matrix by a thin one ten times faster so.
        p = flat_p[at_p : at_p + n * rank].view(rank, n).t()
        q = flat_q[at_q : at_q + columns * rank].view(rank, columns).t()
        placed.append(Matrix(name, m, p, q))
        at_p, at_q = at_p + n * rank, at_q + columns * rank
    return placed, flat_p, flat_q


def compute_ps(matrices: Sequence[Matrix], batched: bool) -> None:
    """P = M·Q for each."""
    for some in _together(matrices, batched):
        _multiply([x.m for x in some], [x.q for x in some], [x.p for x in some])


def compute_qs(matrices: Sequence[Matrix], batched: bool) -> None:
    """Q = Mᵀ·P for each."""
    for some in _together(matrices, batched):
        _multiply([x.m.t() for x in some], [x.p for x in some], [x.q for x in some])


def reconstruct(matrices: Sequence[Matrix], batched: bool) -> None:
    """M = P·Qᵀ for each."""
    for some in _together(matrices, batched):
        _multiply([x.p for x in some], [x.q.t() for x in some], [x.m for x in some])


def random_like(matrix: Tensor, seed: str) -> Tensor:
    """Return normal values in a matrix's shape: the same on all ranks and after a restart, a function of the seed alone."""
    # ``hash`` differs between processes.
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(number)
    return torch.randn(matrix.shape, generator=generator).to(dtype=matrix.dtype, device=matrix.device)


def orthogonalize(matrix: Tensor, epsilon: float = 0) -> Tensor:
    """Make the columns of an n × r matrix orthonormal, in place.

    Args:
        epsilon: 0: by QR. Else by Gram–Schmidt with ``epsilon`` added to each norm, which keeps a column of zeros finite.
    """
    if epsilon == 0:
        narrow = matrix.dtype in (torch.float16, torch.bfloat16)
        q, _ = torch.linalg.qr(matrix.float() if narrow else matrix)
        return matrix.copy_(q)
    for i in range(matrix.shape[1]):
        column = matrix[:, i : i + 1]
        column /= column.norm() + epsilon
        if i + 1 < matrix.shape[1]:
            rest = matrix[:, i + 1 :]
            rest -= column @ (column.t() @ rest)
    return matrix


def _together(matrices: Sequence[Matrix], batched: bool) -> Iterator[list[Matrix]]:
    """Yield matrices one by one, or those of one shape together."""
    if not batched:
        yield from ([x] for x in matrices)
        return
    by_shape: dict[Any, list[Matrix]] = {}
    for x in matrices:
        by_shape.setdefault((x.m.shape, x.q.shape), []).append(x)
    yield from by_shape.values()


def _multiply(left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    if len(left) == 1:
        torch.mm(left[0], right[0], out=out[0])
        return
    by_column = torch.stack([matrix.t() for matrix in right]).transpose(1, 2)
    for target, product in zip(out, torch.bmm(torch.stack(list(left)), by_column), strict=True):
        target.copy_(product)
