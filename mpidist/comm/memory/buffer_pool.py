"""Buffer pool for received messages: a block returns to the pool when its last user drops it.

A received tensor keeps its memory for as long as the program refers to it. Fresh memory of some MiB
costs a page fault every 4 KiB, more than the transfer itself (docs/decisions/0008), so a released
block is kept for the next message of its size.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from mpidist.errors import FrameError

# Below this size the allocator is faster than the pool.
_SMALLEST_BYTES = 16 << 10
# Limit of idle memory; beyond it, the oldest block of the largest size is freed.
_KEPT_BYTES = 256 << 20


def zeroed(nbytes: int) -> memoryview:
    """Return ``nbytes`` of writable zeros.

    Large memory is address space only until it is written: bytes that a peer announces and never
    sends take none.

    Raises:
        FrameError: The machine does not have that much memory.
    """
    try:
        # Not a bytearray, which writes its zeros: calloc gets pages that read as zeros.
        memory: Any = np.zeros(nbytes, np.uint8)
        return memoryview(memory)
    except (MemoryError, ValueError, OverflowError) as error:
        raise FrameError(
            f"{nbytes} bytes are announced, for which this rank has no memory"
        ) from error


# A weakref.finalize costs four times as much as __del__.
class _Lease(np.ndarray):
    """The part of a block that is in use; releases the block when it is dropped."""

    pool: BufferPool
    block: np.ndarray

    def __del__(self) -> None:
        self.pool.release(self.block)


class BufferPool:
    """Pool of blocks of 2ᵏ and 1.5·2ᵏ bytes."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._idle: dict[int, list[np.ndarray]] = {}
        self._idle_bytes = 0
        # Re-entrant: the garbage collector may run during ``acquire`` and release a block in the
        # same thread.
        self._lock = threading.RLock()

    def acquire(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of writable memory.

        The memory returns to the pool when no tensor, array or view refers to it.
        """
        if nbytes < _SMALLEST_BYTES:
            return memoryview(bytearray(nbytes))
        size = block_bytes(nbytes)
        with self._lock:
            held = self._idle.get(size)
            block = held.pop() if held else None
            if block is not None:
                self._idle_bytes -= size
        if block is None:
            block = np.empty(size, np.uint8)
        lease: Any = _Lease(nbytes, np.uint8, block)
        lease.pool, lease.block = self, block
        # Not the array itself: in numpy a view of a view refers to the first owner, so the lease
        # would be dropped while in use. Every view of a memoryview refers to its exporter, the
        # lease.
        return memoryview(lease)

    def release(self, block: np.ndarray) -> None:
        """Return a block to the pool."""
        with self._lock:
            self._idle.setdefault(block.nbytes, []).append(block)
            self._idle_bytes += block.nbytes
            while self._idle_bytes > self._kept_bytes:
                largest = max(size for size, held in self._idle.items() if held)
                self._idle[largest].pop(0)
                self._idle_bytes -= largest


def block_bytes(nbytes: int) -> int:
    """Return the smallest block size that holds ``nbytes``; at most a third of it is unused."""
    power = 1 << max(nbytes - 1, 1).bit_length()
    return power * 3 // 4 if nbytes <= power * 3 // 4 else power
