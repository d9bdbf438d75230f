"""Half-precision wires: each rank sends its master, rounded to bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from mpidist.comm.group_types import Group
from mpidist.zero.wire_memory import Scratch, busiest_nbytes, shards_of

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class HalfWire:
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

    is_rounding = True

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _NAMES:
            raise ValueError(f"HalfWire needs {' or '.join(map(str, _NAMES))}; got {dtype}")
        self.dtype = dtype
        self.name = _NAMES[dtype]
        self._scratch = Scratch()

    def master_dtype(self, flat_dtype: torch.dtype) -> torch.dtype:
        """Return ``flat_dtype``: float32, float64, or the wire's own.

        Raises:
            TypeError: Another dtype.
        """
        if flat_dtype not in (torch.float32, torch.float64, self.dtype):
            raise TypeError(
                f"the wire {self.name} carries float32, float64 and {self.dtype}; got parameters "
                f"of {flat_dtype}"
            )
        return flat_dtype

    @torch.no_grad()
    def share(
        self, group: Group, master: torch.Tensor, flat: torch.Tensor, bounds: Sequence[int]
    ) -> None:
        """Send the rounded master, and widen all ranks' into ``flat``: see ``Wire.share``.

        Collective: over the group.
        """
        self.master_dtype(flat.dtype)
        shards = shards_of(group.where("share"), group.rank, group.size, master, flat, bounds)
        if group.size == 1:
            shards[0].copy_(master)
        elif flat.dtype is self.dtype:
            own = shards[group.rank]
            if own.data_ptr() != master.data_ptr():
                own.copy_(master)
            group.all_gather(shards, own)
        elif bounds[-1] > bounds[0]:
            nbytes = (bounds[-1] - bounds[0]) * self.dtype.itemsize
            narrow = self._scratch.take(nbytes, flat.device).view(self.dtype)
            parts = narrow.split([shard.numel() for shard in shards])
            group.all_gather(parts, parts[group.rank].copy_(master))
            flat.detach()[bounds[0] : bounds[-1]].copy_(narrow)

    def nbytes(self, bounds: Sequence[int]) -> int:
        """Return the bytes that the busiest rank sends and receives in one ``share``."""
        return busiest_nbytes(
            [self.dtype.itemsize * (stop - start) for start, stop in pairwise(bounds)]
        )
