"""Loopback: messages that a rank sends to itself, with copies of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import BufferPool
from mpidist.comm.memory.stream import device_at
from mpidist.comm.serialization.tensor_format import Part
from mpidist.comm.transport.incoming import Arrive, Incoming


def add_copies(
    incoming: Incoming,
    parts: Sequence[Part],
    devices: Sequence[int | None],
    memory: BufferPool,
) -> None:
    """Give a message copies of ``parts``: caller and callee share no more memory than two ranks do.

    Args:
        devices: For each part, the index of the device for the copy; None for host memory.
        memory: Lends host memory for the copies.
    """
    arrive: list[Arrive] = []
    where = devices or (None,) * len(parts)
    incoming.parts = [
        _host_copy(part, memory) if device is None else _device_copy(part, device, arrive)
        for part, device in zip(parts, where, strict=True)
    ]
    incoming.arrive = arrive


def _device_copy(part: Part, device: int, arrive: list[Arrive]) -> torch.Tensor:
    assert isinstance(part, torch.Tensor)
    copy = part.to(torch.device("cuda", device), copy=True)
    if (current := device_at(copy.device)) is not None:
        # The reader is another thread with a stream of its own, which waits for this event.
        arrive.append(partial(list, (current.record_current_stream(),)))
    return copy


def _host_copy(part: Part, memory: BufferPool) -> memoryview:
    if isinstance(part, torch.Tensor) and not part.is_cpu:
        part = part.cpu()
    source = memoryview(
        buffer.memory(part.data_ptr(), part.nbytes) if isinstance(part, torch.Tensor) else part
    ).cast("B")
    space = memory.acquire(source.nbytes)
    space[:] = source
    return space
