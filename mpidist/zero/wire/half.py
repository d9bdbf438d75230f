"""Half-precision wires: each rank sends its master, rounded to bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from mpidist.comm.group_types import Group
from mpidist.zero.wire.wire import Wire

Tensor = torch.Tensor
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class HalfWire(Wire):
    """Wire of masters rounded to a half type; all ranks, the owner too, widen the rounded values.

    The master itself is not rounded, so that steps smaller than a unit of the half type add up. A
    buffer of the half type itself is sent without rounding. float16 makes infinities of magnitudes
    from 65520 on.

    Deviation: FairScale's ``OSS(broadcast_fp16=True)`` rounds the parameters that the owner steps,
    and such steps are lost.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        ValueError: Another dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _NAMES:
            raise ValueError(f"HalfWire needs {' or '.join(map(str, _NAMES))}; got {dtype}")
        super().__init__()
        self.dtype = dtype
        self.name = _NAMES[dtype]

    def require(self, dtype: torch.dtype) -> None:
        """Refuse any dtype but float32, float64, and the wire's own.

        Raises:
            TypeError: Another dtype.
        """
        if dtype not in (torch.float32, torch.float64, self.dtype):
            raise TypeError(
                f"the wire {self.name} carries float32, float64 and {self.dtype}; got parameters "
                f"of {dtype}"
            )

    def _exchange(self, group: Group, master: Tensor, flat: Tensor, bounds: Sequence[int]) -> None:
        if flat.dtype is self.dtype:
            shards = [flat[start:stop] for start, stop in pairwise(bounds)]
            group.all_gather(shards, shards[group.rank].copy_(master))
        elif bounds[-1] > bounds[0]:
            nbytes = (bounds[-1] - bounds[0]) * self.dtype.itemsize
            narrow = self._scratch.take(nbytes, flat.device).view(self.dtype)
            parts = narrow.split([stop - start for start, stop in pairwise(bounds)])
            group.all_gather(parts, parts[group.rank].copy_(master))
            flat[bounds[0] : bounds[-1]].copy_(narrow)
