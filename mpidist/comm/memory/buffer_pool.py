"""Memory to receive into that comes back when its last user drops it.

What a message brings belongs to whoever gets it, for as long as he likes. Fresh memory of some MiB
costs a page fault every 4 KiB, more than the transfer itself (docs/decisions/0008): memory that has
served is kept for the next message of its size.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from mpidist.errors import FrameError

_SMALLEST_BYTES = 16 << 10  # below, the allocator is faster than any list
_KEPT_BYTES = 256 << 20  # idle memory that is kept; beyond, the oldest goes back to the system


def zeroed(nbytes: int) -> memoryview:
    """Return ``nbytes`` of writable zeros, owned by whoever refers to them.

    Large memory is address space alone until it is written: who announces bytes and never sends
    them takes none.

    Raises:
        FrameError: The machine does not have as much.
    """
    try:
        # Not a bytearray, which writes its zeros: calloc takes pages of the system that read as
        # zeros without.
        memory: Any = np.zeros(nbytes, np.uint8)
        return memoryview(memory)
    except (MemoryError, ValueError, OverflowError) as error:
        raise FrameError(
            f"{nbytes} bytes are announced, for which this rank has no memory"
        ) from error


class _Lease(np.ndarray):  # a weakref.finalize costs four times as much
    """The part of a block that is in use."""

    memory: ReceiveMemory
    block: Any

    def __del__(self) -> None:
        self.memory.take_back(self.block)


class ReceiveMemory:
    """Blocks of sizes 2ᵏ and 1.5·2ᵏ, lent and taken back."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._idle: dict[int, list[Any]] = {}
        self._idle_bytes = 0
        # Re-entrant: taking a block may run the garbage collector, which gives another one back in
        # the same thread.
        self._lock = threading.RLock()

    def lend(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of writable memory, which comes back when no tensor, array or view refers to it any more."""
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
        lease.memory, lease.block = self, block
        # Not the array itself: numpy lets a view of a view refer to the first owner, and the lease
        # would end under its user. All that is made of a memoryview keeps its exporter, which is
        # the lease.
        return memoryview(lease)

    def take_back(self, block: Any) -> None:
        """Keep a block for the next message of its size."""
        with self._lock:
            self._idle.setdefault(block.nbytes, []).append(block)
            self._idle_bytes += block.nbytes
            while self._idle_bytes > self._kept_bytes:
                largest = max(size for size, held in self._idle.items() if held)
                self._idle[largest].pop(0)
                self._idle_bytes -= largest


def block_bytes(nbytes: int) -> int:
    """Return the smallest block size that holds ``nbytes``: at most half as much again is unused."""
    power = 1 << max(nbytes - 1, 1).bit_length()
    return power * 3 // 4 if nbytes <= power * 3 // 4 else power
