"""Staging of device memory through pinned host memory, in chunks.

One chunk is at MPI while the next is copied to the host and the previous one to the device.

Letters: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mpidist.comm.algorithms import reductions
from mpidist.comm.algorithms.reduce_op import ReduceOp
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Event
from mpidist.comm.mpi.communicator import Communicator

# A copy of this size takes ten times as long as its launch.
CHUNK_BYTES = 4 << 20
# One slot is copied to the host, one is at MPI, one is copied to the device.
_SLOTS = 3


def all_reduce(
    comm: Communicator, fence: StreamFence, flat: torch.Tensor, operation: ReduceOp
) -> None:
    """Reduce a flat tensor of N elements over all ranks, in place.

    Collective: over the group, with the same N on all ranks.

    Blocks: until the last chunk's copy to the device is queued.
    """

    def reduce(chunk: torch.Tensor) -> None:
        reductions.all_reduce(comm, (), (chunk,), operation)

    through_host(fence, flat, reduce)


def through_host(
    fence: StreamFence,
    flat: torch.Tensor,
    exchange: Callable[[torch.Tensor], object],
    reads: bool = True,
    writes: bool = True,
) -> None:
    """Call ``exchange`` with a host copy of each chunk of a flat device tensor.

    Args:
        fence: The operation's fence.
        flat: The tensor.
        exchange: Communicates a chunk in place; called in the order of the chunks.
        reads: Copy the tensor to the host first.
        writes: Copy the result back to the device.
    """
    device, chunk = fence.device, max(CHUNK_BYTES // flat.element_size(), 1)
    parts = list(flat.split(chunk)) if flat.numel() else [flat]
    slots = [
        device.staging(min(chunk, flat.numel()), flat.dtype) for _ in range(min(_SLOTS, len(parts)))
    ]
    copied_down: dict[int, Event] = {}
    copied_up: dict[int, Event] = {}

    def copy_down(place: int) -> None:
        # The slot is free after its previous chunk's copy to the device; the stream waits, not the
        # host.
        if place >= len(parts):
            return
        if place - len(slots) in copied_up:
            device.down.wait(copied_up.pop(place - len(slots)))
        if reads:
            device.down.do(
                partial(_copy, slots[place % len(slots)][: parts[place].numel()], parts[place])
            )
        copied_down[place] = device.down.record()

    # The last slot is filled in the loop, after its previous chunk.
    for place in range(len(slots) - 1):
        copy_down(place)
    for place, part in enumerate(parts):
        copy_down(place + len(slots) - 1)
        copied_down.pop(place).synchronize()
        held = slots[place % len(slots)][: part.numel()]
        exchange(held)
        if writes:
            device.up.do(partial(_copy, part, held))
        copied_up[place] = device.up.record()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
