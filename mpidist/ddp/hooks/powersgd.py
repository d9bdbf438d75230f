"""PowerSGD: gradients as products of two thin matrices, with what was left out added to the next step's.

For each parameter M (n × m, its first dimension by the others) and rank r: P = M·Q, averaged and
orthogonalised; Q = Mᵀ·P, averaged; M ≈ P·Qᵀ. Vectors, and matrices that would not shrink enough,
are averaged as they are. On CUDA a bucket takes five launches of our kernels, whatever the number
of its tensors.

Letters: W ranks; n × m the matrix; r the approximation's rank.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019 (arXiv 1905.13727), algorithm 1; names and options of
torch's ``powerSGD_hook``. Differences: errors of parameters that are sent whole are not kept (they
are zero on average); what is sent whole travels beside the Ps, so that a bucket takes two
collectives; complex buckets are sent whole.

A gradient that is not finite (an overflow under AMP) makes the averaged P, or Q, not finite, on all
ranks alike. Then the gradients of that bucket become NaN on all ranks, which a GradScaler sees, and
its errors are what they were before the step. Other buckets of the step, which were finite, have
ended it. On CUDA the host asks for both at once, behind Q: between the stages the device would
stand idle for as long as the answer takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.resolve_group import native_group
from mpidist.ddp.bucket import GradBucket
from mpidist.ddp.hooks import lowrank
from mpidist.ddp.hooks.default import average
from mpidist.ddp.hooks.lowrank import Factors
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.hooks.stages import in_order, run_stages
from mpidist.future import Future
from mpidist.kernels import powersgd
from mpidist.kernels.pack import pack, unpack

Tensor = torch.Tensor


@in_order
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Approximate each gradient of the bucket by a matrix of rank r, and average that."""
    return _after_start(state, bucket, _compress)


@in_order
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Approximate the whole bucket by one square matrix of rank r: faster, and coarser, than matrix by matrix."""
    return _after_start(state, bucket, _compress_as_square)


def _after_start(
    state: PowerSGDState, bucket: GradBucket, compress: Callable[..., Callable[[], Any]]
) -> Future[Tensor]:
    group = native_group(state.process_group)
    step = state.count_step(bucket)
    if step < state.start_powerSGD_iter or bucket.buffer().dtype.is_complex:
        return average(group, bucket.buffer(), bucket.node_tensor())
    # What comes before the first stage's collective happens here, beside the group's thread; the
    # stages are one operation of it.
    return run_stages(
        group, bucket.buffer(), compress(state, bucket, group, step), waits_for_device=True
    )


def _compress(state: PowerSGDState, bucket: GradBucket, group: Any, step: int) -> Callable[[], Any]:
    factors = _factors_of(state, bucket)
    if factors is None:
        state.count_elements(bucket.buffer().numel(), bucket.buffer().numel())
        return lambda: average(group, bucket.buffer(), bucket.node_tensor()).wait()
    state.count_elements(bucket.buffer().numel(), factors.flat_p.numel() + factors.flat_q.numel())
    return _prepare(state, factors, group, step)


def _prepare(state: PowerSGDState, factors: Factors, group: Any, step: int) -> Callable[[], bool]:
    """Do what comes before the first collective; return what begins with it, and says whether the step was finite."""
    matrices, epsilon = factors.bucket, state.orthogonalization_epsilon
    # By the device, not by this rank's kernels: another rank may have none, and the collectives of
    # a step are the same on all.
    asks_once = matrices.on_device is not None or matrices.device.type == "cuda"
    last = state.q_memory_dict if state.warm_start else {}
    for name, x in zip(factors.names, matrices.matrices, strict=True):
        if last.get(name) is not x.q:
            state.initialize_q(name, x.q, step)
    powersgd.orthogonalize_q(matrices, epsilon)
    powersgd.project(matrices)

    def stages() -> bool:
        group.all_reduce(factors.flat_p, AVG)
        # All ranks hold the same sums, so all give up the same steps, without a message.
        largest_p = last_q = None
        if asks_once:
            largest_p, last_q = _largest(factors.flat_p), factors.flat_q.clone()
        elif not powersgd.is_finite(factors.flat_p):
            powersgd.give_up(matrices)
            return False
        powersgd.orthogonalize_p(matrices, epsilon)
        powersgd.backproject(matrices)
        group.all_reduce(factors.flat_q, AVG)
        if largest_p is None:
            is_finite = powersgd.is_finite(factors.flat_q)
        else:
            is_finite = all(
                map(math.isfinite, torch.stack((largest_p, _largest(factors.flat_q))).tolist())
            )
        if not is_finite:
            if last_q is None:
                state.forget_q(factors.names)
            else:
                factors.flat_q.copy_(last_q)
            powersgd.give_up(matrices)
            return False
        powersgd.reconstruct(matrices)
        if state.warm_start:
            state.q_memory_dict.update(
                zip(factors.names, (x.q for x in matrices.matrices), strict=True)
            )
        return True

    return stages


def _largest(flat: Tensor) -> Tensor:
    """Return the largest magnitude on the flat tensor's device, NaN if there is one: finite if all elements are."""
    return torch.linalg.vector_norm(flat, math.inf)


def _factors_of(state: PowerSGDState, bucket: GradBucket) -> Factors | None:
    """Return the bucket's matrices and factors, those of the last step if nothing has changed; None if all is sent whole."""
    options = (
        state.matrix_approximation_rank,
        state.min_compression_rate,
        state.use_error_feedback,
    )
    what = (
        bucket.buffer().data_ptr(),
        bucket.buffer().dtype,
        bucket.names(),
        bucket.forms(),
        options,
    )
    factors = state.cached(bucket.index(), what, lambda: _placed(state, bucket))
    if factors is not None and any(
        state.error_dict.get(name) is not error for name, error in factors.errors.items()
    ):
        state.drop_cached(bucket.index())  # the errors were loaded since
        return _factors_of(state, bucket)
    return factors


def _placed(state: PowerSGDState, bucket: GradBucket) -> Factors | None:
    matrices: list[tuple[str, Tensor, Tensor | None]] = []
    whole, errors = [], {}
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        is_worth_it = lowrank.is_worth_it(
            gradient.shape, state.matrix_approximation_rank, state.min_compression_rate
        )
        if not is_worth_it or not lowrank.is_matrix(gradient):
            whole.append(gradient)
        elif state.use_error_feedback:
            errors[name] = state.error_of(name, gradient)
            matrices.append((name, lowrank.as_matrix(gradient), lowrank.as_matrix(errors[name])))
        else:
            matrices.append((name, lowrank.as_matrix(gradient), None))
    if not matrices:
        return None
    batched = state.batch_tensors_with_same_shape
    return lowrank.place(matrices, whole, state.matrix_approximation_rank, batched, errors)


def _compress_as_square(
    state: PowerSGDState, bucket: GradBucket, group: Any, step: int
) -> Callable[[], None]:
    flat = bucket.buffer()
    numel, side = flat.numel(), math.ceil(math.sqrt(flat.numel()))
    # Q is of this bucket; after a change of the buckets there is a new one
    name = "square of " + ", ".join(bucket.names())

    def placed() -> Factors:
        square, error = flat.new_zeros(2, side, side)
        return lowrank.place(
            [(name, square, error if state.use_error_feedback else None)],
            (),
            state.matrix_approximation_rank,
        )

    options = (state.matrix_approximation_rank, state.use_error_feedback)
    factors = state.cached(bucket.index(), (name, flat.dtype, flat.device, options), placed)
    (x,) = factors.bucket.matrices
    state.count_elements(numel, factors.flat_p.numel() + factors.flat_q.numel())
    x.m.view(-1)[:numel].copy_(flat)
    errors: list[Tensor] = []
    if x.e is not None:
        errors = [
            state.error_of(name, gradient)
            for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True)
        ]
        pack(errors, x.e.view(-1)[:numel])
    begun = _prepare(state, factors, group, step)

    def stages() -> None:
        is_finite = begun()
        flat.copy_(x.m.view(-1)[:numel])
        # what the approximation has left behind the last gradient is none's
        x.m.view(-1)[numel:].zero_()
        if x.e is not None:
            if not is_finite:
                x.e.view(-1)[numel:].zero_()
            unpack(x.e.view(-1)[:numel], errors)
            x.e.view(-1)[numel:].zero_()

    return stages
