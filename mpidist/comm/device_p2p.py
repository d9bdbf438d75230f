"""Messages of CUDA tensors: by device pointer if this MPI supports it, else by a host copy.

Sender and receiver decide independently, because MPI matches bytes. Host tensors that are not
contiguous are copied as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpidist.comm.algorithms.host_copies import HostCopies
from mpidist.comm.discovery import capability
from mpidist.comm.memory import buffer
from mpidist.comm.memory.device_request import as_current
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device, Event, device_at, device_of

Tensor = torch.Tensor
# The other rank's memory may be the host's, which this rank does not know.
_NEEDED = ("point_to_point", "point_to_point_with_host")


def to_send(tensor: Tensor) -> tuple[Tensor, Device | None]:
    """Return memory that MPI may read, the tensor's own or a copy, and its device.

    The device of host memory is None.

    Blocks: until the work that produces a tensor on a device has ended.
    """
    if buffer.is_direct(tensor):
        return tensor, None
    device = device_of((tensor,))
    with as_current(device):
        fence = _ready_fence(device, tensor)
        if fence is not None and _takes_messages(tensor):
            fence.synchronize()
            return tensor, device
        (host,), _ = HostCopies((tensor,), (), fence).load()
    return host, None


def to_receive(tensor: Tensor) -> tuple[Tensor, Device | None, Callable[[], list[Event]]]:
    """Return memory that MPI may write, its device, and a function that stores the message.

    The device of host memory is None. The function, called when MPI has written the memory, copies
    the message into the tensor and returns the events behind which the tensor is complete.

    Blocks: until earlier work on a tensor on a device has ended.
    """
    if buffer.is_direct(tensor):
        return tensor, None, list
    device = device_of((tensor,))
    with as_current(device):
        return _to_receive(tensor, _ready_fence(device, tensor))


def space(
    nbytes: int, where: torch.device
) -> tuple[Tensor, tuple[Tensor, Device | None, Callable[[], list[Event]]]]:
    """Return new memory on a device for a message, and the result of ``to_receive`` for it.

    The memory is allocated on a stream of this library, so that the host waits for that stream
    alone, and not for the calling thread's current stream, which is usually the user's. Code that
    uses the memory on another stream must call ``used_here``.
    """
    device = device_at(where)
    assert device is not None
    with device.as_current():
        tensor = device.empty(nbytes, torch.uint8)
        fence = StreamFence(device, (tensor,), device.down.record())
        fence.wait_ready()
        return tensor, _to_receive(tensor, fence)


def _to_receive(
    tensor: Tensor, fence: StreamFence | None
) -> tuple[Tensor, Device | None, Callable[[], list[Event]]]:
    if fence is not None and _takes_messages(tensor):
        fence.synchronize()
        return tensor, fence.device, list
    copies = HostCopies((), (tensor,), fence)
    _, (host,) = copies.load()

    def arrive() -> list[Event]:
        with as_current(None if fence is None else fence.device):
            if fence is not None:
                # The thread that waits for a message may not be the one that started it.
                fence.wait_ready()
            copies.store()
            return fence.record() if fence is not None else []

    return host, None, arrive


def _ready_fence(device: Device | None, tensor: Tensor) -> StreamFence | None:
    if device is None:
        return None
    fence = StreamFence(device, (tensor,))
    fence.wait_ready()
    return fence


def _takes_messages(tensor: Tensor) -> bool:
    known = capability.known_operations(tensor.device)
    return known is not None and known.issuperset(_NEEDED) and buffer.is_plain(tensor)
