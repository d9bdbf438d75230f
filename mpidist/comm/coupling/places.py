"""Memory of samples, used again when no tensor uses it."""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import torch

from mpidist.comm.coupling.messages import Form

# Of the list, and of the argument of getrefcount.
_OWN_REFERENCES = 3


class Places:
    """Memory for tensors of the host.

    The first touch of memory costs as much as its transfer, so memory is kept. Each block is an
    array to which the storage of its tensor, and so every view of it, holds a reference.
    """

    def __init__(self) -> None:
        self._kept: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def tensor(self, form: Form) -> torch.Tensor:
        """Return a tensor of undefined values in memory that no other tensor uses."""
        numel = int(np.prod(form.shape, dtype=np.int64))
        nbytes = numel * form.dtype.itemsize
        if not nbytes:
            return torch.empty(form.shape, dtype=form.dtype)
        kept = self._kept[nbytes]
        for block in kept:
            # The loop's variable is the third reference.
            if sys.getrefcount(block) == _OWN_REFERENCES:
                break
        else:
            block = np.empty(nbytes, np.uint8)
            kept.append(block)
        return torch.from_numpy(block).view(form.dtype).view(form.shape)
