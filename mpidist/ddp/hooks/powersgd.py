"""PowerSGD: gradients as products of two thin matrices, with what was left out added to the next step's.

For each parameter M (n × m, its first dimension by the others) and rank r: P = M·Q, summed over ranks and orthogonalised;
Q = Mᵀ·P, averaged; M ≈ P·Qᵀ. Vectors, and matrices that would not shrink enough, are averaged as they are, first.

What is kept between steps is kept by parameter name, so that it outlives a change of the buckets. The stages of one bucket are
one operation of the group (``in_order``), so no two buckets' collectives can mix, whatever finishes first.

Letters: W ranks; n × m the matrix; r the approximation's rank.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019 (arXiv 1905.13727), algorithm 1; names and options of torch's ``powerSGD_hook``. Differences: errors of parameters that are
sent whole are not kept (they are zero on average), and compression may start at any step.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.comm.arithmetic import AVG, SUM
from mpidist.ddp.bucket import GradBucket
from mpidist.ddp.hooks.default import average, completed
from mpidist.ddp.process_group import native_group
from mpidist.future import Future

Tensor = torch.Tensor

_log = logging.getLogger(__name__)


class PowerSGDState:
    """Settings of PowerSGD and what it keeps between steps.

    Args:
        process_group: A group of mpidist, or None for the default.
        matrix_approximation_rank: r.
        start_powerSGD_iter: Steps of plain averaging before compression starts.
        min_compression_rate: Compress only matrices with (n + m) · r · rate < n · m.
        use_error_feedback: Add what a step's approximation left out to the next step's gradient.
        warm_start: Start from the last step's Q instead of a random one.
        orthogonalization_epsilon: Added to norms in Gram–Schmidt; 0 for QR.
        random_seed: Of the random Qs; the same on all ranks.
        compression_stats_logging_frequency: Log the compression rate every so many steps.
        batch_tensors_with_same_shape: Multiply matrices of one shape in one call.

    Attributes:
        iter: Steps so far.
        error_dict: By parameter name, what was left out (the parameter's shape).
        q_memory_dict: By parameter name, the last Q (m × r).
    """

    def __init__(
        self,
        process_group: Any = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError(f"matrix_approximation_rank must be at least 1; got {matrix_approximation_rank}")
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.iter = 0
        self.error_dict: dict[str, Tensor] = {}
        self.q_memory_dict: dict[str, Tensor] = {}
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0

    def __getstate__(self) -> dict[str, Any]:
        warnings.warn("NOTE: process_group is not serializable and is left out of the PowerSGD state", stacklevel=2)
        return {name: value for name, value in self.__dict__.items() if name != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group = None
        warnings.warn(
            "NOTE: the PowerSGD state is set to the default process group; set its process_group for another", stacklevel=2
        )

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements sent), over all steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0.0, before, after)

    def count_step(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes."""
        if not bucket.is_last():
            return
        self.iter += 1
        if self.iter == self.start_powerSGD_iter:
            _log.info("PowerSGD compresses after %d steps", self.iter)
        if self.iter % self.compression_stats_logging_frequency == 0:
            _log.info("PowerSGD: compression rate %.1f, %d elements before, %d sent", *self.compression_stats())


torch.serialization.add_safe_globals([PowerSGDState])  # so that torch.load(weights_only=True) reads a saved one


@dataclass
class _Matrix:
    """One gradient as a matrix, and its place in the memory of the thin ones."""

    name: str
    m: Tensor  # n × m, a view of the bucket
    p: Tensor  # n × r
    q: Tensor  # m × r


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Approximate each gradient of the bucket by a matrix of rank r, and average that."""
    return _after_start(state, bucket, _compress)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Approximate the whole bucket by one square matrix of rank r: faster, and coarser, than matrix by matrix."""
    return _after_start(state, bucket, _compress_as_square)


def _after_start(state: PowerSGDState, bucket: GradBucket, compress: Callable[..., None]) -> Future[Tensor]:
    group = native_group(state.process_group)
    step = state.iter  # noted now: later steps may have begun when the group's thread comes to this bucket
    state.count_step(bucket)
    if step < state.start_powerSGD_iter:
        return average(group, bucket.buffer())
    if group.is_single_node:
        compress(state, bucket, group, step)
        return completed(bucket.buffer())
    return group.in_order(lambda: compress(state, bucket, group, step)).get_future().then(lambda future: bucket.buffer())


def _compress(state: PowerSGDState, bucket: GradBucket, group: Any, step: int) -> None:
    whole, matrices = _sorted_out(state, bucket)
    _average_whole(group, whole)
    if not matrices:
        _count(state, whole, [])
        return
    flat = bucket.buffer()
    flat_p = flat.new_empty(sum(x.m.shape[0] * x.q.shape[1] for x in matrices))
    flat_q = flat.new_empty(sum(x.q.numel() for x in matrices))
    _place(matrices, flat_p, flat_q)
    if state.use_error_feedback:
        for x in matrices:
            error = state.error_dict.get(x.name)
            if error is None:
                error = state.error_dict[x.name] = torch.zeros_like(x.m, memory_format=torch.contiguous_format)
            x.m.add_(error.view_as(x.m))
            error.view_as(x.m).copy_(x.m)
    _start_qs(state, matrices, step)
    for several in _together(state, matrices):
        _multiply([x.m for x in several], [x.q for x in several], [x.p for x in several])
    group.all_reduce(flat_p, SUM)
    for x in matrices:
        orthogonalize(x.p, state.orthogonalization_epsilon)
    for several in _together(state, matrices):
        _multiply([x.m.t() for x in several], [x.p for x in several], [x.q for x in several])
    group.all_reduce(flat_q, AVG)
    for several in _together(state, matrices):
        _multiply([x.p for x in several], [x.q.t() for x in several], [x.m for x in several])
    if state.use_error_feedback:
        for x in matrices:
            state.error_dict[x.name].view_as(x.m).sub_(x.m)
    if state.warm_start:
        for x in matrices:
            state.q_memory_dict[x.name] = x.q
    _count(state, whole, matrices)


def _compress_as_square(state: PowerSGDState, bucket: GradBucket, group: Any, step: int) -> None:
    flat = bucket.buffer()
    side = math.ceil(math.sqrt(flat.numel()))
    square = torch.zeros(side * side, dtype=flat.dtype, device=flat.device)
    rank = min(state.matrix_approximation_rank, side)
    name = "square of " + ", ".join(bucket.names())
    square[: flat.numel()].copy_(flat)
    if state.use_error_feedback and name in state.error_dict:
        square.add_(state.error_dict[name])
    m = square.view(side, side)
    q = state.q_memory_dict.get(name) if state.warm_start else None
    q = _random_q(f"{state.random_seed} {step} {name}", m.new_empty(side, rank)) if q is None else q.clone()
    p = m @ orthogonalize(q, state.orthogonalization_epsilon)
    group.all_reduce(p, SUM)
    orthogonalize(p, state.orthogonalization_epsilon)
    q = (m.t() @ p).contiguous()
    group.all_reduce(q, AVG)
    result = (p @ q.t()).view(-1)
    if state.use_error_feedback:
        state.error_dict[name] = square.sub_(result)
    if state.warm_start:
        state.q_memory_dict[name] = q
    flat.copy_(result[: flat.numel()])
    state.total_numel_before_compression += flat.numel()
    state.total_numel_after_compression += p.numel() + q.numel()


def _sorted_out(state: PowerSGDState, bucket: GradBucket) -> tuple[list[Tensor], list[_Matrix]]:
    """Return the gradients that are sent whole, and those worth compressing."""
    whole, matrices = [], []
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        n = gradient.shape[0] if gradient.dim() else 0
        columns = gradient.numel() // n if n else 0
        rank = min(n, columns, state.matrix_approximation_rank)
        is_worth_it = (n + columns) * rank * state.min_compression_rate < n * columns
        m = _as_matrix(gradient) if gradient.dim() > 1 and is_worth_it else None
        if m is None:
            whole.append(gradient)
        else:
            matrices.append(_Matrix(name, m, m.new_empty(0, rank), m.new_empty(columns, rank)))
    return whole, matrices


def _as_matrix(gradient: Tensor) -> Tensor | None:
    # A permuted layout (channels last) is a matrix, too: its columns in another order.
    order = sorted(range(1, gradient.dim()), key=gradient.stride, reverse=True)
    try:
        return gradient.permute(0, *order).view(gradient.shape[0], -1)
    except RuntimeError:  # no view of it is a matrix, and a copy would not bring the result home
        return None


def _place(matrices: Sequence[_Matrix], flat_p: Tensor, flat_q: Tensor) -> None:
    at_p = at_q = 0
    for x in matrices:
        n, (columns, rank) = x.m.shape[0], x.q.shape
        x.p = flat_p[at_p : at_p + n * rank].view(n, rank)
        x.q = flat_q[at_q : at_q + columns * rank].view(columns, rank)
        at_p, at_q = at_p + n * rank, at_q + columns * rank


def _start_qs(state: PowerSGDState, matrices: Sequence[_Matrix], step: int) -> None:
    for x in matrices:
        last = state.q_memory_dict.get(x.name) if state.warm_start else None
        if last is not None and last.shape == x.q.shape:
            x.q.copy_(last)
        else:
            x.q.copy_(_random_q(f"{state.random_seed} {step} {x.name}", x.q))
        orthogonalize(x.q, state.orthogonalization_epsilon)


def _random_q(seed: str, like: Tensor) -> Tensor:
    # The same on all ranks, and after a restart: a function of seed, step and name alone. (``hash`` differs between processes.)
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(number)
    return torch.randn(like.shape, generator=generator).to(dtype=like.dtype, device=like.device)


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


def _together(state: PowerSGDState, matrices: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
    """Yield matrices one by one, or those of one shape together."""
    if not state.batch_tensors_with_same_shape:
        yield from ([x] for x in matrices)
        return
    by_shape: dict[Any, list[_Matrix]] = {}
    for x in matrices:
        by_shape.setdefault((x.m.shape, x.q.shape), []).append(x)
    yield from by_shape.values()


def _multiply(left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    if len(left) == 1:
        torch.mm(left[0], right[0], out=out[0])
        return
    for target, product in zip(out, torch.bmm(torch.stack(list(left)), torch.stack(list(right))), strict=True):
        target.copy_(product)


def _average_whole(group: Any, whole: Sequence[Tensor]) -> None:
    if len(whole) == 1 and whole[0].is_contiguous():
        group.all_reduce(whole[0], AVG)
    elif whole:
        group.all_reduce_coalesced(list(whole), AVG)


def _count(state: PowerSGDState, whole: Sequence[Tensor], matrices: Sequence[_Matrix]) -> None:
    sent_whole = sum(t.numel() for t in whole)
    state.total_numel_before_compression += sent_whole + sum(x.m.numel() for x in matrices)
    state.total_numel_after_compression += sent_whole + sum(x.p.numel() + x.q.numel() for x in matrices)
