"""PowerSGD: gradients as products of two low-rank matrices, with error feedback.

For each parameter M (n × m, its first dimension by the others) and rank r: P = M·Q, averaged and
orthogonalised; Q = Mᵀ·P, averaged; M ≈ P·Qᵀ. The error is added to the next step's gradient.
Vectors, and matrices that would not shrink enough, are averaged uncompressed. On CUDA a bucket
takes five launches of our kernels, whatever the number of its tensors.

Letters: W ranks; n × m the matrix; r the approximation's rank.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019 (arXiv 1905.13727), algorithm 1; names and options of
torch's ``powerSGD_hook``. Differences: errors of uncompressed parameters are not kept (they are
zero on average); uncompressed tensors are sent with the Ps, so that a bucket takes two collectives;
complex buckets are sent uncompressed.

A gradient that is not finite (an overflow under AMP) makes the averaged P or Q not finite, on all
ranks alike. Then the gradients of that bucket become NaN on all ranks, which a GradScaler detects,
and its errors keep their values from before the step. Finite buckets of the same step complete it.
On CUDA the host reads both results once, after Q, because the device would idle between the stages
while the host waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.group_types import Group
from mpidist.comm.world_group import native_group
from mpidist.ddp.hooks import lowrank
from mpidist.ddp.hooks.default import average
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.lowrank import Factors
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.hooks.stages import in_order, run_stages
from mpidist.ddp.hooks.torch_bucket import on_either_module
from mpidist.future import Future
from mpidist.kernels import powersgd
from mpidist.kernels.pack import pack, unpack

Tensor = torch.Tensor


@in_order
@on_either_module
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average approximations of the bucket's gradients by matrices of rank r."""
    return _after_start(state, bucket, _compress)


@in_order
@on_either_module
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket's approximation by one square matrix of rank r: faster and coarser."""
    return _after_start(state, bucket, _compress_as_square)


def _after_start(
    state: PowerSGDState, bucket: GradBucket, compress: Callable[..., Callable[[], object]]
) -> Future[Tensor]:
    group = native_group(state.process_group)
    step = state.count_step(bucket)
    if step < state.start_powerSGD_iter or bucket.buffer().dtype.is_complex:
        return average(group, bucket.buffer(), bucket.node_tensor())
    # The work before the first collective runs here, on autograd's thread. The stages are one
    # operation of the group.
    return run_stages(
        group, bucket.buffer(), compress(state, bucket, group, step), waits_for_device=True
    )


def _compress(
    state: PowerSGDState, bucket: GradBucket, group: Group, step: int
) -> Callable[[], object]:
    factors = factors_of(state, bucket)
    if factors is None:
        state.count_elements(bucket.buffer().numel(), bucket.buffer().numel())
        return lambda: average(group, bucket.buffer(), bucket.node_tensor()).wait()
    state.count_elements(bucket.buffer().numel(), factors.flat_p.numel() + factors.flat_q.numel())
    return prepare(state, factors, group, step)


def prepare(state: PowerSGDState, factors: Factors, group: Group, step: int) -> Callable[[], bool]:
    """Compute the Ps; return the stages from the first collective on.

    The stages return whether the step was finite.

    Args:
        group: Averages the Ps and the Qs.
        step: Seeds the Qs of matrices that have none.
    """
    matrices, epsilon = factors.bucket, state.orthogonalization_epsilon
    # Decided by the device and not by this rank's kernels, which another rank may lack: the
    # collectives of a step must be the same on all ranks.
    checks_once = matrices.on_device is not None or matrices.device.type == "cuda"
    last = state.q_memory_dict if state.warm_start else {}
    for name, x in zip(factors.names, matrices.matrices, strict=True):
        if last.get(name) is not x.q:
            state.initialize_q(name, x.q, step)
    powersgd.orthogonalize_q(matrices, epsilon)
    powersgd.project(matrices)

    def stages() -> bool:
        group.all_reduce(factors.flat_p, AVG)
        # All ranks hold the same sums, and therefore skip the same steps without a message.
        largest_p = last_q = None
        if checks_once:
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
    """Return the largest magnitude as a tensor on the device; NaN if an element is NaN."""
    return torch.linalg.vector_norm(flat, math.inf)


def factors_of(state: PowerSGDState, bucket: GradBucket) -> Factors | None:
    """Return the bucket's factors, those of the last step if unchanged; None if uncompressed."""
    options = (
        state.matrix_approximation_rank,
        state.min_compression_rate,
        state.use_error_feedback,
    )
    key = (
        bucket.buffer().data_ptr(),
        bucket.buffer().dtype,
        state.names_of(bucket),
        bucket.forms(),
        options,
    )
    factors = state.cached(bucket.index(), key, lambda: _placed(state, bucket))
    if factors is not None and any(
        state.error_dict.get(name) is not error for name, error in factors.errors.items()
    ):
        # The errors have been loaded since.
        state.drop_cached(bucket.index())
        return factors_of(state, bucket)
    return factors


def _placed(state: PowerSGDState, bucket: GradBucket) -> Factors | None:
    matrices: list[tuple[str, Tensor, Tensor | None]] = []
    whole, errors = [], {}
    for name, gradient in zip(state.names_of(bucket), bucket.gradients(), strict=True):
        is_compressible = lowrank.is_compressible(
            gradient.shape, state.matrix_approximation_rank, state.min_compression_rate
        )
        if not is_compressible or not lowrank.is_matrix(gradient):
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
    state: PowerSGDState, bucket: GradBucket, group: Group, step: int
) -> Callable[[], None]:
    flat = bucket.buffer()
    numel, side = flat.numel(), math.ceil(math.sqrt(flat.numel()))
    # Q belongs to this bucket; rebuilt buckets have a new one.
    name = "square of " + ", ".join(state.names_of(bucket))

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
            for name, gradient in zip(state.names_of(bucket), bucket.gradients(), strict=True)
        ]
        pack(errors, x.e.view(-1)[:numel])
    compress = prepare(state, factors, group, step)

    def stages() -> None:
        is_finite = compress()
        flat.copy_(x.m.view(-1)[:numel])
        # The approximation also writes the padding after the last gradient.
        x.m.view(-1)[numel:].zero_()
        if x.e is not None:
            if not is_finite:
                x.e.view(-1)[numel:].zero_()
            unpack(x.e.view(-1)[:numel], errors)
            x.e.view(-1)[numel:].zero_()

    return stages
