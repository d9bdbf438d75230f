"""The average itself, and the average in half precision; each works alone, and the compressing ones around any other hook.

A hook is called once for each bucket of dense gradients, in one order on all ranks, and returns a
future of the reduced buffer. On one node the transfer is processor time and gains nothing from a
thread, so it happens in the call; between nodes it goes to the group's thread.

Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``, whose names and signatures
these are. It divides by W before the sum and in half precision; here the sum is divided in fp32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.algorithms.shared_memory import NodeTensor
from mpidist.comm.memory.stream import used_here
from mpidist.comm.resolve_group import native_group
from mpidist.ddp.bucket import GradBucket
from mpidist.ddp.hooks.stages import in_order, is_in_order, launch, run_stages
from mpidist.ddp.ownership import Ownership, ownership_of
from mpidist.future import Future, completed

Tensor = torch.Tensor
Hook = Callable[[Any, Any], Any]


@in_order
def allreduce_hook(process_group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket."""
    return average(native_group(process_group), bucket.buffer(), bucket.node_tensor())


@in_order
def fp16_compress_hook(process_group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket in fp16: half the bytes of fp32. Complex numbers travel as they are."""
    return _compress(process_group, bucket, torch.float16)


@in_order
def bf16_compress_hook(process_group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket in bf16: half the bytes of fp32, and its range.

    Complex numbers travel as they are.
    """
    return _compress(process_group, bucket, torch.bfloat16)


@in_order
def noop_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Leave each rank's gradients as they are: what a step costs without communication."""
    return completed(bucket.buffer())


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return ``hook`` on an fp16 copy of the bucket."""
    return Compressed(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return ``hook`` on a bf16 copy of the bucket."""
    return Compressed(hook, torch.bfloat16)


class Compressed:
    """A hook on a narrow copy of the bucket; saved and loaded like the hook that it holds."""

    def __init__(self, hook: Hook, dtype: torch.dtype) -> None:
        self.hook = hook
        self.dtype = dtype
        self._narrow: dict[
            int, Tensor
            # by memory, for all steps: fresh memory is dear, and hooks know a buffer by its address
        ] = {}

    @property
    def is_in_order(self) -> bool:
        """Say whether the hook within is."""
        return is_in_order(self.hook)

    @property
    def ownership(self) -> Ownership | None:
        """Return the owners that the hook within reduces to."""
        return ownership_of(self.hook)

    def __call__(self, state: Any, bucket: GradBucket) -> Any:
        """Narrow the bucket, call the hook, and widen what comes."""
        buffer = bucket.buffer()
        if buffer.dtype.is_complex:
            return self.hook(state, bucket)
        bucket.set_buffer(self._narrow_of(bucket, buffer).copy_(buffer))

        def decompress(future: Any) -> Tensor:
            value = future.value()
            bucket.set_buffer(buffer)
            return buffer.copy_(used_here(value[0] if isinstance(value, (list, tuple)) else value))

        return self.hook(state, bucket).then(decompress)

    def _narrow_of(self, bucket: GradBucket, buffer: Tensor) -> Tensor:
        held = self._narrow.get(bucket.slot())
        fits = held is not None and held.device == buffer.device
        if held is not None and fits:  # where buckets take turns, memory of the longest one so far
            fits = (
                held.numel() >= buffer.numel()
                if bucket.takes_turns()
                else held.shape == buffer.shape
            )
        if held is None or not fits:
            held = self._narrow[bucket.slot()] = torch.empty_like(buffer, dtype=self.dtype)
        return held[: buffer.numel()] if bucket.takes_turns() else held


def average(group: Any, tensor: Tensor, node_tensor: NodeTensor | None = None) -> Future[Tensor]:
    """Start to average a tensor over a native group, in place; return a future of it.

    Args:
        node_tensor: The same memory, as all ranks share it.
    """
    if node_tensor is not None and node_tensor.group is group:
        node_tensor.average()
        return completed(tensor)
    return launch(
        group,
        tensor,
        lambda async_op: group.all_reduce(tensor, AVG, async_op=async_op),
        lambda: tensor,
    )


def _compress(process_group: Any, bucket: GradBucket, dtype: torch.dtype) -> Future[Tensor]:
    buffer = bucket.buffer()
    if buffer.dtype.is_complex:
        return allreduce_hook(process_group, bucket)
    group = native_group(process_group)

    def stages() -> None:
        narrow = buffer.to(dtype)
        group.all_reduce(narrow, AVG)
        buffer.copy_(narrow)

    return run_stages(group, buffer, stages)
