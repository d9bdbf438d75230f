"""BufferRotation of buckets in a few buffers: the memory, and which bucket may write into a buffer now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.algorithms.shared_memory import NodeTensor, share

Tensor = torch.Tensor


class RotatingBuffers:
    """Buffers of one device, each of the biggest bucket's size: memory of the node where ranks share one.

    Collective: constructed by all ranks of the group, if it ``shares``.

    Args:
        sizes_bytes: Of the buckets on the device, multiples of a cache line.
        most: How many buffers there are at most.
        shares: Use memory that all ranks of the group reach, if there is any.

    Attributes:
        count: The number of buffers.
    """

    def __init__(
        self, group: Any, device: torch.device, sizes_bytes: Sequence[int], most: int, shares: bool
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
    ) -> tuple[NodeTensor | None, Tensor]:
        """Return a buffer's first elements: of all ranks, if they share the memory, and of this one."""
        if self._memory is None:
            return None, self._buffers[buffer][: numel * dtype.itemsize].view(dtype)
        if not numel:
            return None, torch.empty(0, dtype=dtype, device=self._device)
        node_tensor = self._memory.tensor(buffer * self._size_bytes, numel, dtype)
        return node_tensor, node_tensor.own


class BufferRotation:
    """The order in which buckets have the buffers in one backward pass: pure bookkeeping.

    Args:
        buffers: For each bucket the number of its buffer; None for one that has memory of its own.
        launch_order: The buckets that leave, in their order.
    """

    def __init__(self, buffers: Sequence[int | None], launch_order: Sequence[int]) -> None:
        self._buffers = buffers
        # by buffer, the buckets that have not passed it on yet, the next one last
        self._waiting: dict[int, list[int]] = {}
        for index in reversed(launch_order):
            buffer = buffers[index]
            if buffer is not None:
                self._waiting.setdefault(buffer, []).append(index)

    def is_current(self, index: int) -> bool:
        """Say whether a bucket's gradients may be written: no bucket before it needs the same buffer any more."""
        buffer = self._buffers[index]
        return buffer is None or self._waiting.get(buffer, [])[-1:] == [index]

    def holder(self, index: int) -> int | None:
        """Return the bucket that has to pass the buffer on before this one may write; None if it may."""
        buffer = self._buffers[index]
        waiting = self._waiting.get(buffer, []) if buffer is not None else []
        return waiting[-1] if waiting and waiting[-1] != index else None

    def release(self, index: int) -> None:
        """Give a bucket's buffer to the next; its results have been copied out."""
        buffer = self._buffers[index]
        if buffer is not None:
            assert self._waiting[buffer][-1] == index, (
                "buckets pass their buffers on in the order in which they leave"
            )
            self._waiting[buffer].pop()
