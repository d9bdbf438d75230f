"""Shards of a flat buffer for a wire, and the scratch memory of its messages.

Letters: W ranks of the group; N elements of the flat buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch

from mpidist.kernels.launch import stream_of

Tensor = torch.Tensor


class Scratch:
    """Memory kept between calls: one block for each thread and stream, of the largest size so far.

    Buffers shared one after the other use the same block. Other threads and streams, which may
    share a buffer at the same time, have their own. A copied or pickled ``Scratch`` has no memory.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int, int], Tensor] = {}

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return ``nbytes`` undefined bytes, valid until this thread and stream call again."""
        key = (device, stream_of(device), threading.get_ident())
        held = self._held.get(key)
        if held is None or held.numel() < nbytes:
            held = self._held[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held[:nbytes]


def shards_of(
    where: str, rank: int, size: int, master: Tensor, flat: Tensor, bounds: Sequence[int]
) -> list[Tensor]:
    """Return the W shards as views of ``flat``, after checks of the arguments of ``Wire.share``.

    Raises:
        TypeError: The dtypes of master and flat differ.
        ValueError: Sizes, bounds, devices or strides do not fit.
    """
    if len(bounds) != size + 1 or any(
        start > stop for start, stop in pairwise([0, *bounds, flat.numel()])
    ):
        raise ValueError(
            f"{where} needs {size + 1} ascending bounds within {flat.numel()} elements; got "
            f"{list(bounds)}"
        )
    numel = bounds[rank + 1] - bounds[rank]
    if master.dtype != flat.dtype:
        raise TypeError(f"{where} needs a master of flat's dtype, {flat.dtype}; got {master.dtype}")
    if master.numel() != numel or master.device != flat.device:
        raise ValueError(
            f"{where} needs a master of {numel} elements on {flat.device}; got {master.numel()} on "
            f"{master.device}"
        )
    if flat.dim() != 1 or not flat.is_contiguous() or not master.is_contiguous():
        raise ValueError(
            f"{where} needs a contiguous master and a contiguous flat of one dimension; got "
            f"strides {master.stride()} and {flat.stride()}"
        )
    held = flat.detach()
    return [held[start:stop] for start, stop in pairwise(bounds)]


def busiest_nbytes(sizes: Sequence[int]) -> int:
    """Return the bytes that the rank with the largest part sends and receives in an all-gather."""
    largest = max(sizes)
    return sum(sizes) - largest + (len(sizes) - 1) * largest
