"""Copies of small device tensors in host memory: one transfer for all of one device and dtype.

A copy to ordinary host memory blocks until the device has done all earlier work on the stream, so
a copy for each of many numbers costs as many waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return detached copies in host memory, none of which shares memory with another.

    Blocks: until the device tensors are computed on the current stream of their device.

    Args:
        tensors: Of any devices and dtypes; those of 0 dimensions on a device are copied together.
    """
    copies: list[Tensor | None] = [None] * len(tensors)
    scalars: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if tensor.dim() == 0 and not tensor.is_cpu and tensor.layout is torch.strided:
            scalars[tensor.device, tensor.dtype].append(place)
        else:
            copies[place] = copy_of(tensor)
    for places in scalars.values():
        together = torch.stack([tensors[place].detach() for place in places]).cpu()
        for place, value in zip(places, together, strict=True):
            copies[place] = value.clone()
    return [copy for copy in copies if copy is not None]


def copy_of(tensor: Tensor) -> Tensor:
    """Return a detached copy in host memory, by one copy."""
    value = tensor.detach()
    return value.clone() if value.is_cpu else value.cpu()
