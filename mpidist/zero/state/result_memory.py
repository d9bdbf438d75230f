"""Host memory for large results, in huge pages; reused when the last result has been freed.

The first touch of 4 KiB pages takes three times as long as the transfer that fills them.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import torch

from mpidist.comm.mpi import autograd_mode

K = TypeVar("K", bound=Hashable)

_HUGE_PAGE = 2 << 20


class _Held(np.ndarray):
    """Owner of the memory of some tensors; lives as long as any of them.

    A subclass, because the views of a plain array cannot refer weakly to their owner.
    """


class KeptMemory:
    """Memory of one set of tensors at a time."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._user: weakref.ref[_Held] | None = None

    def tensors(self, wanted: Mapping[K, tuple[int, torch.dtype]]) -> dict[K, torch.Tensor]:
        """Return tensors with undefined values, in the last call's memory if its tensors are gone.

        Args:
            wanted: Number of elements and dtype of each.
        """
        starts, nbytes = {}, 0
        for key, (numel, dtype) in wanted.items():
            starts[key] = nbytes
            nbytes += -(-numel * dtype.itemsize // 64) * 64
        if not nbytes:
            return {
                key: torch.empty(numel, dtype=dtype, device="cpu")
                for key, (numel, dtype) in wanted.items()
            }
        is_free = self._user is None or self._user() is None
        if self._block is None or not is_free or len(self._block) < nbytes:
            self._block = _huge_pages(nbytes)
        held = np.frombuffer(self._block, np.uint8, nbytes).view(_Held)
        self._user = weakref.ref(held)
        # From a memoryview: numpy would have the tensors refer to the block, not to the array.
        memory = memoryview(held)  # type: ignore[arg-type]
        with autograd_mode.allocating():
            return {
                key: torch.frombuffer(memory, dtype=dtype, count=numel, offset=starts[key])
                if numel
                else torch.empty(0, dtype=dtype, device="cpu")
                for key, (numel, dtype) in wanted.items()
            }


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, in host memory in huge pages from 4 MiB: each step reads and writes all."""
    if device.type != "cpu" or numel * dtype.itemsize < 2 * _HUGE_PAGE:
        return torch.zeros(numel, dtype=dtype, device=device)
    with autograd_mode.allocating():
        return torch.frombuffer(_huge_pages(numel * dtype.itemsize), dtype=dtype, count=numel)


def _huge_pages(nbytes: int) -> mmap.mmap:
    # The size is not rounded up: small pages at the end waste no memory.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
