"""Rotation of a few buffers among the buckets whose gradients are reduced to owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.comm.algorithms.shared_memory import SharedTensor, share
from mpidist.comm.group_types import Group

Tensor = torch.Tensor


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
        """Say whether a bucket may be written: all buckets before it released its buffer."""
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
