"""Memory of a plan's buckets: their own, or a few buffers that they use in rotation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch

from mpidist.comm.algorithms.shared_memory import SharedTensor, share
from mpidist.comm.group_types import Group
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.buckets.owned_bucket import OwnedBucket, Owners
from mpidist.ddp.buckets.sparse_bucket import SparseBucket

Tensor = torch.Tensor

_LINE_BYTES = 64


class RotatingBuffers:
    """Buffers of one device, each as large as its largest bucket.

    The buffers are in memory that all ranks of the group map, if available.

    Collective: constructed by all ranks of the group, if ``shares``.

    Args:
        sizes_bytes: Sizes of the device's buckets, multiples of a cache line.
        most: Largest number of buffers.
        shares: Use memory that all ranks of the group map, if there is any.

    Attributes:
        count: Number of buffers.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        sizes_bytes: Sequence[int],
        most: int,
        shares: bool,
    ) -> None:
        self.count = min(most, len(sizes_bytes))
        self._size_bytes = max(sizes_bytes)
        self._memory = share(group, self.count * self._size_bytes) if shares else None
        self._buffers: list[Tensor] = []
        if self._memory is None:
            self._buffers = [
                torch.zeros(self._size_bytes, dtype=torch.uint8, device=device)
                for _ in range(self.count)
            ]
        self._device = device

    def tensor(
        self, buffer: int, numel: int, dtype: torch.dtype
    ) -> tuple[SharedTensor | None, Tensor]:
        """Return a buffer's first elements: those of all ranks, if shared, and this rank's."""
        if self._memory is None:
            return None, self._buffers[buffer][: numel * dtype.itemsize].view(dtype)
        if not numel:
            return None, torch.empty(0, dtype=dtype, device=self._device)
        node_tensor = self._memory.tensor(buffer * self._size_bytes, numel, dtype)
        return node_tensor, node_tensor.own


class BucketAllocator:
    """Allocator of the buckets of one plan.

    Args:
        plan: For each bucket the places of its parameters.
        sparse: Indices of the buckets of sparse gradients.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        plan: Sequence[tuple[int, ...]],
        sparse: Collection[int],
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._plan = plan
        self._sparse = sparse

    def separate(self, group: Group, shares: bool) -> list[Bucket | SparseBucket]:
        """Return buckets with memory of their own.

        The memory is the node's where ranks share it; each bucket starts at a cache line.

        Collective: over the group, if ``shares``.
        """
        sizes = [
            0 if index in self._sparse else self._aligned_bytes(places)
            for index, places in enumerate(self._plan)
        ]
        memory = share(group, sum(sizes)) if shares else None
        starts = accumulate(sizes, initial=0)
        buckets: list[Bucket | SparseBucket] = []
        for index, (places, start_bytes) in enumerate(zip(self._plan, starts, strict=False)):
            if index in self._sparse:
                buckets.append(self._sparse_bucket(places))
                continue
            numel, node_tensor = self._numel(places), None
            if memory is not None and numel:
                node_tensor = memory.tensor(start_bytes, numel, self._parameters[places[0]].dtype)
            buckets.append(Bucket(places, self._parameters, self._names, node_tensor))
        return buckets

    def rotating(self, group: Group, owners: Owners, shares: bool) -> list[Bucket | SparseBucket]:
        """Return buckets that rotate in a few buffers of the largest bucket's size.

        Collective: over the group, if ``shares``.
        """
        sizes: dict[torch.device, list[int]] = {}
        for index, places in enumerate(self._plan):
            if index not in self._sparse:
                sizes.setdefault(self._device_of(places), []).append(self._aligned_bytes(places))
        memories = {
            device: RotatingBuffers(group, device, held, owners.buffers, shares)
            for device, held in sizes.items()
        }
        counts = accumulate((memory.count for memory in memories.values()), initial=0)
        first = dict(zip(memories, counts, strict=False))
        buckets: list[Bucket | SparseBucket] = []
        placed: Counter[torch.device] = Counter()
        for index, places in enumerate(self._plan):
            if index in self._sparse:
                buckets.append(self._sparse_bucket(places))
                continue
            device, dtype = self._device_of(places), self._parameters[places[0]].dtype
            buffer = placed[device] % memories[device].count
            placed[device] += 1
            memory = memories[device].tensor(buffer, self._numel(places), dtype)
            number = first[device] + buffer
            buckets.append(
                OwnedBucket(places, self._parameters, self._names, *memory, number, owners)
            )
        return buckets

    def _sparse_bucket(self, places: Sequence[int]) -> SparseBucket:
        return SparseBucket(places[0], self._parameters[places[0]], self._names[places[0]])

    def _device_of(self, places: Sequence[int]) -> torch.device:
        return self._parameters[places[0]].device

    def _numel(self, places: Sequence[int]) -> int:
        return sum(self._parameters[place].numel() for place in places)

    def _aligned_bytes(self, places: Sequence[int]) -> int:
        size_bytes = sum(self._parameters[place].nbytes for place in places)
        return -(-size_bytes // _LINE_BYTES) * _LINE_BYTES


class BufferRotation:
    """Order in which buckets use the buffers in one backward pass: pure bookkeeping.

    Args:
        buffers: For each bucket the number of its buffer; None for a bucket with its own memory.
        launch_order: Indices of the buckets to launch.
    """

    def __init__(self, buffers: Sequence[int | None], launch_order: Sequence[int]) -> None:
        self._buffers = buffers
        # For each buffer the buckets that have not released it, the next one last.
        self._waiting: dict[int, list[int]] = {}
        for index in reversed(launch_order):
            buffer = buffers[index]
            if buffer is not None:
                self._waiting.setdefault(buffer, []).append(index)

    def is_current(self, index: int) -> bool:
        """Return whether a bucket may be written: all buckets before it released its buffer."""
        buffer = self._buffers[index]
        return buffer is None or self._waiting.get(buffer, [])[-1:] == [index]

    def holder(self, index: int) -> int | None:
        """Return the bucket that must release this one's buffer first; None if there is none."""
        buffer = self._buffers[index]
        waiting = self._waiting.get(buffer, []) if buffer is not None else []
        return waiting[-1] if waiting and waiting[-1] != index else None

    def release(self, index: int) -> None:
        """Pass a bucket's buffer to the next bucket, after its results have been copied out."""
        buffer = self._buffers[index]
        if buffer is not None:
            assert self._waiting[buffer][-1] == index, "buckets release buffers in launch order"
            self._waiting[buffer].pop()
