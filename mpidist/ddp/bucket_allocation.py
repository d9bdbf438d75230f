"""Allocation of a plan's buckets: memory of their own, or a few buffers in rotation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch

from mpidist.comm.algorithms.shared_memory import share
from mpidist.comm.group_types import Group
from mpidist.ddp.bucket import Bucket
from mpidist.ddp.buffer_rotation import RotatingBuffers
from mpidist.ddp.owned_bucket import OwnedBucket, Owners
from mpidist.ddp.sparse_bucket import SparseBucket

Tensor = torch.Tensor

_LINE_BYTES = 64


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
