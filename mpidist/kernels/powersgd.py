"""PowerSGD on all matrices of a bucket: X = M·s + E, P = X·Q, Q = Xᵀ·P, M = P·Qᵀ, E = X − M.

M holds X until ``reconstruct``, and E is unchanged until then: a step whose sums are not finite is
given up (``give_up``).

On CUDA each function is one launch of ``cuda/powersgd.cu`` for any number and shapes of matrices
(two launches to orthogonalize matrices that are too tall for one block's registers: above 8192
rows, fewer at ranks above 4). The twins in this file do the same with torch's operations. Tensors
that are not worth compressing are sent together with the Ps.

Letters: n × m a matrix; r the approximation's rank, at most 32 on CUDA.

Source: Vogels, Karimireddy, Jaggi, NeurIPS 2019 (arXiv 1905.13727), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mpidist.kernels import powersgd_plan
from mpidist.kernels.launch import (
    NAMES,
    compute_dtype,
    has_kernels,
    scalar,
)
from mpidist.kernels.pack import pack, unpack
from mpidist.kernels.powersgd_launches import BucketKernels

Tensor = torch.Tensor

_BLOCK_NUMEL = 1 << 18  # of a product that the twin of ``reconstruct`` computes at once


@dataclass(frozen=True)
class Matrix:
    """One gradient as a matrix, its error feedback, and its two thin factors."""

    m: Tensor  # n × m, contiguous: M, and with E, X between ``project`` and ``reconstruct``
    e: Tensor | None  # n × m, contiguous; None without error feedback
    p: Tensor  # n × r, column by column in memory
    q: Tensor  # m × r, the same


class Bucket:
    """Matrices of one bucket, of one dtype (float16, bfloat16, float32, float64) on one device.

    Args:
        matrices: They share no memory with each other.
        whole: Tensors that are sent uncompressed.
        slots: A flat tensor that holds all of ``whole``, one after another; sent with the Ps.
        batched: Let the twins multiply matrices of one shape together.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        whole: Sequence[Tensor],
        slots: Tensor,
        batched: bool = False,
    ) -> None:
        self.matrices = list(matrices)
        self.whole = list(whole)
        self.slots = slots
        self.batched = batched
        first = self.matrices[0].m
        self.dtype, self.device = first.dtype, first.device
        highest = max(x.p.shape[1] for x in self.matrices)
        self.on_device: BucketKernels | None = None
        if has_kernels(first) and self.dtype in NAMES and highest <= powersgd_plan.HIGHEST_RANK:
            self.on_device = BucketKernels(items_of(self), self.dtype, self.device)


def project(bucket: Bucket, scale: float = 1.0) -> None:
    """Compute M = M·scale + E and P = M·Q for each matrix; without E, P = M·scale·Q.

    Whole tensors, times ``scale``, are copied to their slots.
    """
    if bucket.on_device is not None:
        bucket.on_device.launch("project", scalar(scale, bucket.dtype))
        return
    xs = []
    for x in bucket.matrices:
        m = x.m if scale == 1 else (x.m.to(compute_dtype(bucket.dtype)) * scale).to(bucket.dtype)
        xs.append(m if x.e is None else torch.add(m, x.e, out=x.m))
    for some in _together(bucket):
        _multiply(
            [xs[i] for i in some],
            [bucket.matrices[i].q for i in some],
            [bucket.matrices[i].p for i in some],
        )
    pack(bucket.whole, bucket.slots, scale)


def backproject(bucket: Bucket, scale: float = 1.0) -> None:
    """Compute Q = Xᵀ·P for each matrix; ``scale`` is the same as for ``project``."""
    if bucket.on_device is not None:
        bucket.on_device.backproject(scale)
        return
    for some in _together(bucket):
        matrices = [bucket.matrices[i] for i in some]
        _multiply([x.m.t() for x in matrices], [x.p for x in matrices], [x.q for x in matrices])
        if scale != 1:
            for x in matrices:
                if x.e is None:
                    x.q.mul_(scale)


def reconstruct(bucket: Bucket) -> None:
    """Compute E = X − P·Qᵀ and M = P·Qᵀ for each matrix; copy whole tensors from their slots."""
    if bucket.on_device is not None:
        bucket.on_device.launch("reconstruct")
        return
    for some in _together(bucket):
        matrices = [bucket.matrices[i] for i in some]
        if len(matrices) == 1:
            _reconstruct_by_rows(matrices[0])
            continue
        products = [torch.empty_like(x.m) if x.e is not None else x.m for x in matrices]
        _multiply([x.p for x in matrices], [x.q.t() for x in matrices], products)
        for x, product in zip(matrices, products, strict=True):
            if x.e is not None:
                torch.sub(x.m, product, out=x.e)
                x.m.copy_(product)
    unpack(bucket.slots, bucket.whole)


def give_up(bucket: Bucket) -> None:
    """End a step whose sums are not finite, between ``project`` and ``reconstruct``.

    M becomes NaN on every rank, so that a gradient scaler notices; whole tensors are copied back
    from their slots. E is kept, except that elements that are not finite become zero, because the
    next step would not be finite either.
    """
    for x in bucket.matrices:
        x.m.fill_(math.nan)
        if x.e is not None:
            torch.nan_to_num(x.e, nan=0.0, posinf=0.0, neginf=0.0, out=x.e)
    unpack(bucket.slots, bucket.whole)


def is_finite(flat: Tensor) -> bool:
    """Return whether all elements are finite. Blocks: until they are computed."""
    # A fast pass first: the sum is not finite if an element is not. The sum may also overflow,
    # which the slow pass decides.
    return math.isfinite(flat.sum(dtype=compute_dtype(flat.dtype)).item()) or bool(
        flat.isfinite().all()
    )


def orthogonalize_p(bucket: Bucket, epsilon: float = 0) -> None:
    """Make the columns of each P orthonormal, in place; see ``orthogonalize``."""
    _orthogonalize(bucket, [x.p for x in bucket.matrices], 0, epsilon)


def orthogonalize_q(bucket: Bucket, epsilon: float = 0) -> None:
    """Make the columns of each Q orthonormal, in place; see ``orthogonalize``."""
    _orthogonalize(bucket, [x.q for x in bucket.matrices], 1, epsilon)


def orthogonalize(matrix: Tensor, epsilon: float = 0) -> Tensor:
    """Make the columns of an n × r matrix orthonormal, in place, with torch's operations.

    Args:
        epsilon: 0: by QR, the fastest on the host. Signs of columns, and the result for dependent
            ones, may differ from Gram–Schmidt's; P·Qᵀ does not. Else as the kernel.
    """
    if epsilon == 0:
        q, _ = torch.linalg.qr(matrix.to(compute_dtype(matrix.dtype)))
        return matrix.copy_(q)
    return gram_schmidt(matrix, epsilon)


def _orthogonalize(bucket: Bucket, thin: Sequence[Tensor], is_q: int, epsilon: float) -> None:
    if bucket.on_device is not None:
        bucket.on_device.orthogonalize(is_q, epsilon)
        return
    # On a device QR may flip columns that the kernel does not, and another rank may use the kernel.
    one = gram_schmidt if bucket.device.type == "cuda" else orthogonalize
    for matrix in thin:
        one(matrix, epsilon)


def gram_schmidt(matrix: Tensor, epsilon: float = 0) -> Tensor:
    """Compute what the kernel computes: modified Gram–Schmidt in fp32 (fp64), in place.

    The second sweep removes the components that rounding left: of a column that depends on the
    others the first sweep leaves nothing but rounding, of any direction, which the norm makes long.
    ``epsilon``, added to each norm, keeps a column of zeros finite; without it one remains zero.
    """
    values = matrix.to(compute_dtype(matrix.dtype))
    for step in range(2 * matrix.shape[1]):
        i = step % matrix.shape[1]
        column = values[:, i : i + 1]
        norm = column.norm() + epsilon
        column *= torch.where(norm == 0, 0, 1 / norm)
        rest = values[:, i + 1 :]
        rest -= column @ (column.t() @ rest)
    return matrix.copy_(values)


def items_of(bucket: Bucket) -> list[powersgd_plan.Item]:
    """Return the kernels' items of a bucket; matrices first, so that their blocks need no map."""
    items = []
    for x in bucket.matrices:
        addresses = (
            x.m.data_ptr(),
            0 if x.e is None else x.e.data_ptr(),
            x.p.data_ptr(),
            x.q.data_ptr(),
        )
        items.append(powersgd_plan.Item(addresses, x.m.shape[0], x.m.shape[1], x.p.shape[1]))
    slot = bucket.slots.data_ptr()
    for tensor in bucket.whole:
        items.append(powersgd_plan.Item((tensor.data_ptr(), 0, slot, 0), tensor.numel(), 1, 0))
        slot += tensor.nbytes
    return items


def _together(bucket: Bucket) -> Iterator[list[int]]:
    """Yield indices of matrices, one by one, or grouped by shape if ``batched``."""
    if not bucket.batched:
        yield from ([i] for i in range(len(bucket.matrices)))
        return
    by_shape: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for i, x in enumerate(bucket.matrices):
        by_shape.setdefault((x.m.shape, x.q.shape), []).append(i)
    yield from by_shape.values()


def _reconstruct_by_rows(x: Matrix) -> None:
    if x.e is None:
        torch.mm(x.p, x.q.t(), out=x.m)
        return
    # M holds X, so the product needs memory of its own: a few rows, which stay in the cache.
    rows, right = max(1, _BLOCK_NUMEL // x.m.shape[1]), x.q.t()
    whole = [(x.m, x.e, x.p)]
    blocks = (
        whole
        if len(x.m) <= rows
        else zip(x.m.split(rows), x.e.split(rows), x.p.split(rows), strict=True)
    )
    for m, e, p in blocks:
        product = torch.mm(p, right)
        torch.sub(m, product, out=e)
        m.copy_(product)


def _multiply(left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    if len(left) == 1:
        torch.mm(left[0], right[0], out=out[0])
        return
    by_column = torch.stack([matrix.t() for matrix in right]).transpose(1, 2)
    for target, product in zip(out, torch.bmm(torch.stack(list(left)), by_column), strict=True):
        target.copy_(product)
