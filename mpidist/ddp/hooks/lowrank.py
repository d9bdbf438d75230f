"""Gradients as matrices, which of them are worth compressing, and where their thin factors lie: no communication.

Letters: n × m a matrix; r the approximation's rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpidist.kernels import powersgd

Tensor = torch.Tensor


@dataclass(frozen=True)
class Factors:
    """A bucket's matrices with their thin ones, which lie in two flat tensors that travel as one each."""

    names: tuple[str, ...]  # of the matrices
    errors: dict[str, Tensor]  # what was left out of them, in the gradients' shapes
    bucket: powersgd.Bucket
    flat_p: Tensor  # every P, and the tensors that are sent whole
    flat_q: Tensor  # every Q


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
    """Return a contiguous view of a gradient as n × m, its first dimension by the others, or the other way round.

    Raises:
        RuntimeError: Its layout allows none.
    """
    # A permuted layout (channels last) is a matrix, too: its columns in another order.
    order = sorted(range(1, gradient.dim()), key=gradient.stride, reverse=True)
    matrix = gradient.permute(0, *order).view(gradient.shape[0], -1)
    # a transposed parameter's: the approximation of the transpose serves as well
    if not matrix.is_contiguous():
        matrix = matrix.t()
    if not matrix.is_contiguous():
        raise RuntimeError(
            f"a gradient of shape {tuple(gradient.shape)} and strides {gradient.stride()} is no "
            "matrix in memory"
        )
    return matrix


def place(
    matrices: Sequence[tuple[str, Tensor, Tensor | None]],
    whole: Sequence[Tensor],
    wanted_rank: int,
    batched: bool = False,
    errors: dict[str, Tensor] | None = None,
) -> Factors:
    """Give each matrix its P and Q, and each tensor that is sent whole its place beside the Ps.

    Args:
        matrices: Name, matrix, and what was left out of it (None without error feedback).
        batched: Multiply matrices of one shape together (on the host).
        errors: The tensors that the matrices' errors are views of, by name.
    """
    like = matrices[0][1]
    ranks = [rank_of(m.shape[0], m.shape[1], wanted_rank) for _, m, _ in matrices]
    whole_numel = sum(t.numel() for t in whole)
    flat_p = like.new_zeros(
        whole_numel + sum(m.shape[0] * r for (_, m, _), r in zip(matrices, ranks, strict=True))
    )
    # A kernel reads 16 bytes of a Q at once.
    unit = max(16 // like.element_size(), 1)
    sizes = [
        -(-m.shape[1] * r // unit) * unit for (_, m, _), r in zip(matrices, ranks, strict=True)
    ]
    flat_q = like.new_zeros(sum(sizes))
    placed, at_p, at_q = [], whole_numel, 0
    for (_, m, error), rank, size in zip(matrices, ranks, sizes, strict=True):
        (n, columns) = m.shape
        # Column by column: BLAS multiplies a large matrix by a thin one ten times faster so.
        p = flat_p[at_p : at_p + n * rank].view(rank, n).t()
        q = flat_q[at_q : at_q + columns * rank].view(rank, columns).t()
        placed.append(powersgd.Matrix(m, error, p, q))
        at_p, at_q = at_p + n * rank, at_q + size
    names = tuple(name for name, _, _ in matrices)
    return Factors(
        names,
        errors or {},
        powersgd.Bucket(placed, whole, flat_p[:whole_numel], batched),
        flat_p,
        flat_q,
    )


def random_like(matrix: Tensor, seed: str) -> Tensor:
    """Return normal values in a matrix's shape: the same on all ranks and after a restart, a function of the seed alone."""
    # ``hash`` differs between processes.
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(number)
    return torch.randn(matrix.shape, generator=generator, dtype=torch.float32, device="cpu").to(
        dtype=matrix.dtype, device=matrix.device
    )
