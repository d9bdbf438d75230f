"""Communication hooks for the average, in the gradients' dtype or in half precision.

The compressing wrappers work around any other hook. A hook is called once for each bucket of dense
gradients, in one order on all ranks, and returns a future of the reduced buffer. On one node the
transfer is processor time, which a thread cannot hide, and happens in the call; between nodes it
runs on the group's thread.

Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``, for names and signatures.
torch divides by W before the sum and in half precision; here the sum is divided in fp32 and rounded
once.
"""

from __future__ import annotations

from functools import partial

import torch

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.algorithms.shared_memory import SharedTensor
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.world_group import native_group
from mpidist.ddp.buckets.ownership import Ownership, ownership_of
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.node_means import Averaging
from mpidist.ddp.hooks.stages import (
    BucketFuture,
    Hook,
    applied,
    future_of,
    in_order,
    is_in_order,
    launch,
    run_stages,
)
from mpidist.ddp.hooks.torch_bucket import name_of, on_either_module
from mpidist.future import Future, completed

Tensor = torch.Tensor


@in_order
@on_either_module
def allreduce_hook(process_group: AnyGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket."""
    return average(native_group(process_group), bucket.buffer(), bucket.node_tensor())


@in_order
@on_either_module
def fp16_compress_hook(process_group: AnyGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket in fp16: half the bytes of fp32. Complex numbers are not compressed."""
    return _compress(process_group, bucket, torch.float16)


@in_order
@on_either_module
def bf16_compress_hook(process_group: AnyGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket in bf16: half the bytes of fp32, with its exponent range.

    Complex numbers are not compressed.
    """
    return _compress(process_group, bucket, torch.bfloat16)


# torch's DistributedDataParallel refuses a hook whose name is torch's own where NCCL is missing.
bf16_compress_hook.__name__ = "mpidist_bf16_compress_hook"


@in_order
@on_either_module
def noop_hook(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Leave each rank's gradients as they are, to measure a step without communication."""
    return completed(bucket.buffer())


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return ``hook`` on an fp16 copy of the bucket."""
    return Compressed(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return ``hook`` on a bf16 copy of the bucket."""
    return Compressed(hook, torch.bfloat16)


class Compressed:
    """A hook on a low-precision copy of the bucket; can be saved if the wrapped hook can."""

    def __init__(self, hook: Hook, dtype: torch.dtype) -> None:
        self.hook = hook
        self.dtype = dtype
        # By the address of a bucket's memory, which modules do not share: a copy, and the ids of
        # the parameters. Kept for all steps, because new memory is slow and hooks identify a buffer
        # by its address.
        self._narrow: dict[int, tuple[Tensor, frozenset[int]]] = {}
        # torch's DDP reads a hook's name.
        self.__name__ = self.__qualname__ = f"{name_of(hook)} in {str(dtype).split('.')[1]}"

    @property
    def is_in_order(self) -> bool:
        """Return whether the wrapped hook keeps the order of collectives."""
        return is_in_order(self.hook)

    @property
    def ownership(self) -> Ownership | None:
        """Return the owners to which the wrapped hook reduces."""
        return ownership_of(self.hook)

    @on_either_module
    def __call__(self, state: object, bucket: GradBucket) -> BucketFuture:
        """Compress the bucket, call the hook, and decompress the result."""
        buffer = bucket.buffer()
        if buffer.dtype.is_complex:
            return self.hook(state, bucket)
        bucket.set_buffer(self._narrow_of(bucket, buffer).copy_(buffer))

        def decompress(value: Tensor) -> Tensor:
            bucket.set_buffer(buffer)
            return buffer.copy_(value)

        future = future_of(self.hook(state, bucket))
        return future.then(applied(decompress, buffer.numel()))

    def __getstate__(self) -> dict[str, object]:
        """Return all attributes without the memory of copies."""
        return {**self.__dict__, "_narrow": {}}

    def _narrow_of(self, bucket: GradBucket, buffer: Tensor) -> Tensor:
        held, _ = self._narrow.get(buffer.data_ptr(), (None, None))
        fits = held is not None and held.device == buffer.device
        if held is not None and fits:
            # Rotating buckets share memory of the longest one so far.
            fits = (
                held.numel() >= buffer.numel()
                if bucket.takes_turns()
                else held.shape == buffer.shape
            )
        if held is None or not fits:
            ids = frozenset(map(id, bucket.parameters()))
            # Earlier ones with these parameters were laid out again.
            for address, (_, own) in list(self._narrow.items()):
                if not own.isdisjoint(ids):
                    del self._narrow[address]
            held = torch.empty_like(buffer, dtype=self.dtype)
            self._narrow[buffer.data_ptr()] = held, ids
        return held[: buffer.numel()] if bucket.takes_turns() else held


def average(
    group: Group, tensor: Tensor, node_tensor: SharedTensor | None = None
) -> Future[Tensor]:
    """Average a tensor over a native group in place; return a future of it.

    Blocks: until the tensor is averaged, unless it ``overlaps_backward``.

    Args:
        node_tensor: The same memory with that of the other ranks, if they share it.
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


def average_narrow(group: Averaging, tensor: Tensor, dtype: torch.dtype) -> None:
    """Average a tensor in place, in a dtype of fewer bytes. Collective: over the group."""
    narrow = tensor.to(dtype)
    group.all_reduce(narrow, AVG)
    tensor.copy_(narrow)


def _compress(process_group: AnyGroup, bucket: GradBucket, dtype: torch.dtype) -> Future[Tensor]:
    buffer = bucket.buffer()
    if buffer.dtype.is_complex:
        return allreduce_hook(process_group, bucket)
    group = native_group(process_group)
    return run_stages(group, buffer, partial(average_narrow, group, buffer, dtype))
