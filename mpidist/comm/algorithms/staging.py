"""Staging of device memory through pinned host memory, in chunks.

One chunk is at MPI while the next is copied to the host and the previous one to the device.

Letters: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mpidist.comm.algorithms import reductions
from mpidist.comm.algorithms.reduce_op import ReduceOp
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device, Event, device_of
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
    _in_turn(fence.device, _chunks(flat), exchange, reads, writes)


def copy_to_host(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors of any devices into ordinary host memory, those of a device by pinned chunks.

    The pinned chunks of one call are reused for all its tensors, and torch's allocator keeps them
    for the next call.

    Blocks: until the host memory holds the values that the calling thread's current streams
    compute.

    Args:
        targets: Contiguous host tensors.
        sources: Of the same shapes and dtypes.
    """
    by_device: dict[Device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        device = device_of((source,))
        if device is None or not source.numel():
            target.copy_(source)
        else:
            # A copy of a strided tensor is work of the current stream.
            flat = source.detach().contiguous().view(-1)
            by_device.setdefault(device, []).append((target.view(-1), flat))
    for device, pairs in by_device.items():
        with device.as_current():
            fence = StreamFence(device, [flat for _, flat in pairs])
            fence.wait_ready()
            places = (part for target, _ in pairs for part in _chunks(target))
            _in_turn(
                device,
                [part for _, flat in pairs for part in _chunks(flat)],
                lambda chunk, places=places: next(places).copy_(chunk),  # type: ignore[misc]
                writes=False,
            )


def _chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(max(CHUNK_BYTES // flat.element_size(), 1))) if flat.numel() else [flat]


def _in_turn(
    device: Device,
    parts: Sequence[torch.Tensor],
    exchange: Callable[[torch.Tensor], object],
    reads: bool = True,
    writes: bool = True,
) -> None:
    longest = max(part.nbytes for part in parts)
    slots = [device.staging(longest, torch.uint8) for _ in range(min(_SLOTS, len(parts)))]
    copied_down: dict[int, Event] = {}
    copied_up: dict[int, Event] = {}

    def held(place: int) -> torch.Tensor:
        return slots[place % len(slots)][: parts[place].nbytes].view(parts[place].dtype)

    def copy_down(place: int) -> None:
        # The slot is free after its previous chunk's copy to the device; the stream waits, not the
        # host.
        if place >= len(parts):
            return
        if place - len(slots) in copied_up:
            device.down.wait(copied_up.pop(place - len(slots)))
        if reads:
            device.down.do(partial(_copy, held(place), parts[place]))
        copied_down[place] = device.down.record()

    # The last slot is filled in the loop, after its previous chunk.
    for place in range(len(slots) - 1):
        copy_down(place)
    for place, part in enumerate(parts):
        copy_down(place + len(slots) - 1)
        copied_down.pop(place).synchronize()
        chunk = held(place)
        exchange(chunk)
        if writes:
            device.up.do(partial(_copy, part, chunk))
        copied_up[place] = device.up.record()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
