"""Matrices of gradients and memory for their low-rank factors, without communication.

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
    """A bucket's matrices, and their factors in two flat tensors.

    Attributes:
        names: Names of the matrices' parameters.
        errors: By name, the error that the approximation left, in the gradient's shape.
        bucket: The matrices and factors as the kernels take them.
        flat_p: Every P, and the tensors that are sent uncompressed.
        flat_q: Every Q.
    """

    names: tuple[str, ...]
    errors: dict[str, Tensor]
    bucket: powersgd.Bucket
    flat_p: Tensor
    flat_q: Tensor


def rank_of(n: int, columns: int, wanted: int) -> int:
    """Return r: no matrix has a higher rank than its shorter side."""
    return min(n, columns, wanted)


def is_compressible(shape: Sequence[int], rank: int, least_rate: float) -> bool:
    """Return whether a gradient is a matrix that compresses by more than ``least_rate``.

    Source:
        torch's ``_should_compress``.
    """
    if len(shape) < 2 or 0 in shape:
        return False
    n, columns = shape[0], torch.Size(shape[1:]).numel()
    return (n + columns) * rank_of(n, columns, rank) * least_rate < n * columns


def is_matrix(gradient: Tensor) -> bool:
    """Return whether a gradient's layout allows ``as_matrix``."""
    try:
        as_matrix(gradient)
    # No view is a matrix, and a copy would not return the result to the gradient.
    except RuntimeError:
        return False
    return True


def as_matrix(gradient: Tensor) -> Tensor:
    """Return a contiguous view of a gradient as n × m, or its transpose.

    The first dimension is n, the product of the others m.

    Raises:
        RuntimeError: The gradient's layout allows no such view.
    """
    # A permuted layout (channels last) is a matrix with its columns in another order.
    order = sorted(range(1, gradient.dim()), key=gradient.stride, reverse=True)
    matrix = gradient.permute(0, *order).view(gradient.shape[0], -1)
    # The gradient of a transposed parameter is approximated by its transpose.
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
    """Allocate P and Q of each matrix, and room in ``flat_p`` for uncompressed tensors.

    Args:
        matrices: Name, matrix, and its error (None without error feedback).
        whole: Tensors that are sent uncompressed.
        batched: Multiply matrices of one shape together (on the host).
        errors: By name, the tensors of which the matrices' errors are views.
    """
    like = matrices[0][1]
    ranks = [rank_of(m.shape[0], m.shape[1], wanted_rank) for _, m, _ in matrices]
    whole_numel = sum(t.numel() for t in whole)
    flat_p = like.new_zeros(
        whole_numel + sum(m.shape[0] * r for (_, m, _), r in zip(matrices, ranks, strict=True))
    )
    # A kernel reads 16 bytes of a Q in one access.
    unit = max(16 // like.element_size(), 1)
    sizes = [
        -(-m.shape[1] * r // unit) * unit for (_, m, _), r in zip(matrices, ranks, strict=True)
    ]
    flat_q = like.new_zeros(sum(sizes))
    placed, at_p, at_q = [], whole_numel, 0
    for (_, m, error), rank, size in zip(matrices, ranks, sizes, strict=True):
        (n, columns) = m.shape
        # In column-major order BLAS multiplies a large matrix by a thin one ten times faster.
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
    """Return normal values in a matrix's shape, which depend on the seed alone.

    The values are the same on all ranks and after a restart.
    """
    # Python's ``hash`` differs between processes.
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(number)
    return torch.randn(matrix.shape, generator=generator, dtype=torch.float32, device="cpu").to(
        dtype=matrix.dtype, device=matrix.device
    )
