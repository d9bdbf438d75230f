"""Device memory through host memory, in chunks: one travels by MPI while the next comes down and the last goes up.

Letters: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mpidist.comm.algorithms import reductions
from mpidist.comm.algorithms.reduce_op import Operation
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Event
from mpidist.comm.mpi.communicator import Communicator

CHUNK_BYTES = 4 << 20  # a copy of this size takes ten times what it takes to start one
_SLOTS = 3  # one comes down, one is at MPI, one goes up


def all_reduce(
    comm: Communicator, fence: StreamFence, flat: torch.Tensor, operation: Operation
) -> None:
    """Reduce a flat tensor of N elements over all ranks, in place.

    Collective: with the same N on all ranks. Blocks: until the last chunk is on its way up.
    """

    def reduce(chunk: torch.Tensor) -> None:
        reductions.all_reduce(comm, (), (chunk,), operation)

    through_host(fence, flat, reduce)


def through_host(
    fence: StreamFence,
    flat: torch.Tensor,
    exchange: Callable[[torch.Tensor], Any],
    reads: bool = True,
    writes: bool = True,
) -> None:
    """Call ``exchange`` with a host copy of each chunk of a flat tensor on a device.

    Args:
        exchange: Communicates a chunk in place; called in the order of the chunks.
        reads: It uses what the tensor holds.
        writes: The tensor gets what it leaves.
    """
    device, chunk = fence.device, max(CHUNK_BYTES // flat.element_size(), 1)
    parts = list(flat.split(chunk)) if flat.numel() else [flat]
    slots = [
        device.staging(min(chunk, flat.numel()), flat.dtype) for _ in range(min(_SLOTS, len(parts)))
    ]
    came: dict[int, Event] = {}
    went: dict[int, Event] = {}

    def bring(place: int) -> None:
        # The slot is free once what it held before has gone up; the host does not wait for that.
        if place >= len(parts):
            return
        if place - len(slots) in went:
            device.down.wait(went.pop(place - len(slots)))
        if reads:
            device.down.do(
                partial(_copy, slots[place % len(slots)][: parts[place].numel()], parts[place])
            )
        came[place] = device.down.record()

    # The last slot's chunk is brought when the one before it has gone.
    for place in range(len(slots) - 1):
        bring(place)
    for place, part in enumerate(parts):
        bring(place + len(slots) - 1)
        came.pop(place).synchronize()
        held = slots[place % len(slots)][: part.numel()]
        exchange(held)
        if writes:
            device.up.do(partial(_copy, part, held))
        went[place] = device.up.record()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
