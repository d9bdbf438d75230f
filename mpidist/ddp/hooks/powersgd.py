"""PowerSGD: gradients as products of two thin matrices, with what was left out added to the next step's.

For each parameter M (n × m, its first dimension by the others) and rank r: P = M·Q, summed over ranks and orthogonalised;
Q = Mᵀ·P, averaged; M ≈ P·Qᵀ. Vectors, and matrices that would not shrink enough, are averaged as they are; that is begun first,
and goes on beside the first product.

Letters: W ranks; n × m the matrix; r the approximation's rank.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019 (arXiv 1905.13727), algorithm 1; names and options of torch's ``powerSGD_hook``. Differences: errors of parameters that are
sent whole are not kept (they are zero on average); complex buckets are sent whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpidist.comm.arithmetic import AVG, SUM
from mpidist.ddp.bucket import GradBucket
from mpidist.ddp.hooks import lowrank
from mpidist.ddp.hooks.default import average
from mpidist.ddp.hooks.lowrank import orthogonalize
from mpidist.ddp.hooks.order import in_order
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.process_group import native_group
from mpidist.future import Future, completed

Tensor = torch.Tensor


@in_order
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Approximate each gradient of the bucket by a matrix of rank r, and average that."""
    return _after_start(state, bucket, _compress)


@in_order
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Approximate the whole bucket by one square matrix of rank r: faster, and coarser, than matrix by matrix."""
    return _after_start(state, bucket, _compress_as_square)


def _after_start(state: PowerSGDState, bucket: GradBucket, compress: Callable[..., Callable[[], None]]) -> Future[Tensor]:
    group = native_group(state.process_group)
    step = state.count_step(bucket)
    if step < state.start_powerSGD_iter or bucket.buffer().is_complex():
        return average(group, bucket.buffer(), bucket.node_tensor())
    # What comes before the first stage's collective happens here, beside the group's thread; the stages are one operation of it.
    stages = compress(state, bucket, group, step)
    if group.is_single_node:
        stages()
        return completed(bucket.buffer())
    return group.in_order(stages).get_future().then(lambda future: _done(future, bucket))


def _done(future: Any, bucket: GradBucket) -> Tensor:
    future.value()  # raises what a stage raised
    return bucket.buffer()


def _compress(state: PowerSGDState, bucket: GradBucket, group: Any, step: int) -> Callable[[], None]:
    whole, worth_it = _sorted_out(state, bucket)
    under_way = _average_whole(group, whole)
    sent_whole = sum(t.numel() for t in whole)
    if not worth_it:
        state.count_elements(sent_whole, sent_whole)
        return lambda: _wait(under_way)
    batched = state.batch_tensors_with_same_shape
    matrices, flat_p, flat_q = lowrank.place(worth_it, state.matrix_approximation_rank)
    state.count_elements(sent_whole + sum(x.m.numel() for x in matrices), sent_whole + flat_p.numel() + flat_q.numel())
    gradients = dict(zip(bucket.names(), bucket.gradients(), strict=True))
    errors: dict[str, Tensor] = {}
    for x in matrices:
        if state.use_error_feedback:
            error = errors[x.name] = lowrank.as_matrix(state.error_of(x.name, gradients[x.name]))
            x.m.add_(error)
            error.copy_(x.m)
        state.start_q(x.name, x.q, step)
        orthogonalize(x.q, state.orthogonalization_epsilon)
    lowrank.compute_ps(matrices, batched)

    def stages() -> None:
        _wait(under_way)
        group.all_reduce(flat_p, SUM)
        for x in matrices:
            orthogonalize(x.p, state.orthogonalization_epsilon)
        lowrank.compute_qs(matrices, batched)
        group.all_reduce(flat_q, AVG)
        lowrank.reconstruct(matrices, batched)
        for x in matrices:
            if state.use_error_feedback:
                errors[x.name].sub_(x.m)
            if state.warm_start:
                state.q_memory_dict[x.name] = x.q

    return stages


def _compress_as_square(state: PowerSGDState, bucket: GradBucket, group: Any, step: int) -> Callable[[], None]:
    flat = bucket.buffer()
    side = math.ceil(math.sqrt(flat.numel()))
    square = torch.zeros(side * side, dtype=flat.dtype, device=flat.device)
    square[: flat.numel()].copy_(flat)
    name = "square of " + ", ".join(bucket.names())  # Q is of this bucket; after a change of the buckets there is a new one
    sizes = [p.numel() for p in bucket.parameters()]
    parts = list(zip(bucket.names(), square[: flat.numel()].split(sizes), strict=True))
    errors: dict[str, Tensor] = {}
    if state.use_error_feedback:
        for (parameter, part), gradient in zip(parts, bucket.gradients(), strict=True):
            errors[parameter] = in_memory_order(state.error_of(parameter, gradient))
            part.add_(errors[parameter])
    (x,), flat_p, flat_q = lowrank.place([(name, square.view(side, side))], state.matrix_approximation_rank)
    state.count_elements(flat.numel(), flat_p.numel() + flat_q.numel())
    state.start_q(name, x.q, step)
    orthogonalize(x.q, state.orthogonalization_epsilon)
    lowrank.compute_ps([x], False)

    def stages() -> None:
        group.all_reduce(flat_p, SUM)
        orthogonalize(x.p, state.orthogonalization_epsilon)
        lowrank.compute_qs([x], False)
        group.all_reduce(flat_q, AVG)
        if state.use_error_feedback:
            for parameter, part in parts:
                errors[parameter].copy_(part)
        lowrank.reconstruct([x], False)
        if state.use_error_feedback:
            for parameter, part in parts:
                errors[parameter].sub_(part)
        if state.warm_start:
            state.q_memory_dict[name] = x.q
        flat.copy_(square[: flat.numel()])

    return stages


def _sorted_out(state: PowerSGDState, bucket: GradBucket) -> tuple[list[Tensor], list[tuple[str, Tensor]]]:
    """Return the gradients that are sent whole, and those worth compressing, as matrices with their names."""
    whole, matrices = [], []
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        is_worth_it = lowrank.is_worth_it(gradient.shape, state.matrix_approximation_rank, state.min_compression_rate)
        if is_worth_it and lowrank.is_matrix(gradient):
            matrices.append((name, lowrank.as_matrix(gradient)))
        else:
            whole.append(gradient)
    return whole, matrices


def in_memory_order(dense: Tensor) -> Tensor:
    """Return a view of a dense tensor's elements one behind the other, as they lie in a bucket."""
    return dense.as_strided((dense.numel(),), (1,))


def _average_whole(group: Any, whole: Sequence[Tensor]) -> Any:
    """Begin to average the tensors in place; return a handle, or None if that is over."""
    if not whole:
        return None
    if len(whole) == 1 and whole[0].is_contiguous():
        return group.all_reduce(whole[0], AVG, async_op=not group.is_single_node)
    return group.all_reduce_coalesced(list(whole), AVG, async_op=not group.is_single_node)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
