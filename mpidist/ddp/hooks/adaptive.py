"""Compression that is measured and decided, bucket by bucket, in the first steps of a training.

Of 200 set-ups compression made six faster (arXiv 2103.00543), and which depends on the network, the
model and the processor. So the hook tries: ``compression_trial`` gives each candidate that the link
allows a few steps, the ranks agree on the times, and the fastest step decides for all of them. From
then on the ranks agree on the length of a step now and then, and try again when it has changed
(``compression_schedule``).

Within a node gradients are averaged exactly, always: there a transfer is a copy, and no compression
is as fast. Where several ranks share a node (``node_means``), bf16 and uint8 average on the node
first, and narrow the node's mean. PowerSGD need not: P and Q are linear in the gradients, so the
average of the ranks' Ps is the P of the average, and each rank's own gradient gives the result of
the node's mean without a copy of whole gradients. An error is then the rank's own.

What PowerSGD has left out of the averages stays in its errors when the decisions change. Another
rank of PowerSGD goes on with them. Any other method adds them to its next gradients, and drops them
when that average is finite: nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from mpidist.comm.group_types import Group
from mpidist.comm.world_group import native_group
from mpidist.ddp.hooks import powersgd, uint8_blocks
from mpidist.ddp.hooks.adaptive_state import AdaptiveState, BucketCall
from mpidist.ddp.hooks.compression_trial import BF16, UINT8, powersgd_rank
from mpidist.ddp.hooks.default import average, average_narrow
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.lowrank import Factors
from mpidist.ddp.hooks.quantization import CHANNEL, average_quantized
from mpidist.ddp.hooks.stages import in_order, run_stages
from mpidist.ddp.hooks.torch_bucket import on_either_module
from mpidist.future import Future

Tensor = torch.Tensor


@in_order
@on_either_module
def adaptive_hook(state: AdaptiveState, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket by the method that is tried or decided for it."""
    group, buffer = native_group(state.process_group), bucket.buffer()
    call = state.begin(bucket, group)
    factors = _factors(state, bucket, call)
    owed = _add_owed(state, bucket, call, factors)
    is_plain = factors is None and call.method not in (BF16, UINT8)
    if is_plain and not owed and not state.schedule.is_trying:
        return average(group, buffer, bucket.node_tensor())
    reduce = _reduction(state, bucket, group, call, factors)

    def stages() -> None:
        call.begun = time.perf_counter()
        reduce()
        call.ended = time.perf_counter()
        # All ranks hold the same average, and therefore drop the same errors.
        if owed and bool(buffer.isfinite().all()):
            for name in owed:
                del state.error_dict[name]
            state.powersgd.forget_q(owed)

    future = run_stages(group, buffer, stages, waits_for_device=factors is not None)
    call.issued = time.perf_counter()
    return future


def _factors(state: AdaptiveState, bucket: GradBucket, call: BucketCall) -> Factors | None:
    """Return a bucket's factors of the decided rank; None if the method compresses none of it."""
    rank = powersgd_rank(call.method)
    if rank is None:
        state.powersgd.drop_cached(bucket.index())
        return None
    state.powersgd.matrix_approximation_rank = rank
    factors = powersgd.factors_of(state.powersgd, bucket)
    if factors is not None:
        call.sent_bytes = factors.flat_p.nbytes + factors.flat_q.nbytes
    return factors


def _add_owed(
    state: AdaptiveState, bucket: GradBucket, call: BucketCall, factors: Factors | None
) -> list[str]:
    """Add to the gradients the errors that the method does not go on with; return their names."""
    errors = state.error_dict
    kept = {} if factors is None else factors.errors
    owed = [name for name in call.names if name in errors and name not in kept] if errors else []
    if owed:
        for name, gradient in zip(call.names, bucket.gradients(), strict=True):
            if name in owed:
                gradient.add_(state.powersgd.error_of(name, gradient))
    return owed


def _reduction(
    state: AdaptiveState,
    bucket: GradBucket,
    group: Group,
    call: BucketCall,
    factors: Factors | None,
) -> Callable[[], object]:
    """Return the stages that reduce a bucket; what comes before the first of them runs here."""
    buffer, means = bucket.buffer(), state.means
    if factors is not None:
        return powersgd.prepare(state.powersgd, factors, group, call.step)
    if call.method == BF16:
        call.sent_bytes = buffer.numel() * 2
        narrow = partial(average_narrow, means or group, buffer, torch.bfloat16)
        return _after_means(state, buffer, narrow)
    if call.method == UINT8:
        flat = buffer.view(-1)
        block = min(CHANNEL, flat.numel())
        call.sent_bytes = uint8_blocks.packed_bytes(flat.numel(), block)
        quantized = partial(average_quantized, flat=flat, block=block)
        if means is None:
            return partial(quantized, group)
        return _after_means(state, buffer, partial(means.by_leaders, buffer, quantized))
    return lambda: average(group, buffer, bucket.node_tensor()).wait()


def _after_means(
    state: AdaptiveState, buffer: Tensor, reduce: Callable[[], object]
) -> Callable[[], object]:
    """Return a reduction that follows the exact average of each node, if there are any."""
    means = state.means
    if means is None:
        return reduce

    def stages() -> None:
        means.average_within(buffer)
        reduce()

    return stages
