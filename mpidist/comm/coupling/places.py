"""Memory of samples, used again when no tensor uses it."""

from __future__ import annotations

import numpy as np
import torch

from mpidist.comm.coupling.messages import Form
from mpidist.comm.memory.buffer_pool import BufferPool

# Of memory that no sample uses: a simulation's samples are large, and few at a time.
_KEPT_BYTES = 1 << 30


class Places:
    """Memory for tensors of the host.

    The first touch of memory costs as much as its transfer, so a pool keeps it. The storage of a
    tensor, and so every view of it, holds the lease of its memory.
    """

    def __init__(self) -> None:
        self._pool = BufferPool(_KEPT_BYTES)

    def tensor(self, form: Form) -> torch.Tensor:
        """Return a tensor of undefined values in memory that no other tensor uses."""
        numel = int(np.prod(form.shape, dtype=np.int64))
        nbytes = numel * form.dtype.itemsize
        if not nbytes:
            return torch.empty(form.shape, dtype=form.dtype)
        memory = torch.frombuffer(self._pool.acquire(nbytes), dtype=torch.uint8)
        return memory.view(form.dtype).view(form.shape)
