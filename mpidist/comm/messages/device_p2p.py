"""Messages of CUDA tensors: by device pointer if this MPI supports it, else by a host copy.

A long message of the process group that goes by the host is sent in pieces (``message_pieces``).
Sender and receiver decide independently, because MPI matches bytes. Host tensors that are not
contiguous are copied as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpidist.comm.algorithms import host_copies
from mpidist.comm.algorithms.host_copies import HostCopies
from mpidist.comm.discovery import capability
from mpidist.comm.memory import buffer
from mpidist.comm.memory.device_request import as_current
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device, Event, Stream, device_at, device_of
from mpidist.comm.messages.message_pieces import HEAD_BYTES
from mpidist.comm.mpi import autograd_mode

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

    A message in pieces may go into the function instead, if it is a ``StagedTarget``.

    Blocks: until earlier work on a tensor on a device has ended.
    """
    if buffer.is_direct(tensor):
        return tensor, None, list
    device = device_of((tensor,))
    with as_current(device):
        return _to_receive(tensor, _ready_fence(device, tensor))


class StagedSource:
    """Device memory that is sent in pieces.

    Attributes:
        device: Its device.
    """

    def __init__(self, device: Device, tensor: Tensor, flat: Tensor) -> None:
        self.device = device
        self._kept = tensor
        self._bytes = flat.view(torch.uint8)

    def load(self, start: int, nbytes: int) -> tuple[Tensor, Event]:
        """See message_pieces.Source."""
        piece = self.device.staging(nbytes, torch.uint8)
        source = self._bytes[start : start + nbytes]
        self.device.down.do(lambda: piece.copy_(source, non_blocking=True))
        return piece, self.device.down.record()


def to_send_in_pieces(tensor: Tensor) -> StagedSource | None:
    """Return a long tensor whose message must be staged; None for any other.

    Blocks: until the work that produces the tensor has ended, so that later copies of pieces wait
    for nothing but the device's memory.
    """
    if tensor.nbytes <= host_copies.PINNED_BYTES or buffer.is_direct(tensor):
        return None
    device = device_of((tensor,))
    if device is None:
        return None
    with as_current(device):
        if _takes_messages(tensor):
            return None
        fence = StreamFence(device, (tensor,))
        fence.wait_ready()
        flat = host_copies.flattened(fence, tensor.detach())
        fence.synchronize()
    return StagedSource(device, tensor, flat)


class StagedTarget:
    """Device memory that is received into, as a whole or in pieces; called when all has arrived.

    Any thread may store pieces.
    """

    def __init__(self, tensor: Tensor, fence: StreamFence, copies: HostCopies) -> None:
        self.device = fence.device
        self._tensor = tensor
        self._fence = fence
        self._copies = copies
        # Key: id of a thread's stream. Value: the stream, and the event after its last piece.
        self._stored: dict[int, tuple[Stream, Event]] = {}

    def space(self, nbytes: int) -> Tensor:
        """See message_pieces.Target."""
        # New memory for each piece, which torch's allocator reuses after the copy to the device:
        # no thread waits for work of the user's stream that the copy may stand behind.
        return self.device.staging(nbytes, torch.uint8)

    def store(self, start: int, piece: Tensor) -> None:
        """See message_pieces.Target."""
        flat = self._tensor.detach().view(-1).view(torch.uint8)
        target = flat[start : start + piece.nbytes]
        with as_current(self.device), autograd_mode.writing((target,)):
            self._fence.wait_ready()
            stream = self.device.up
            stream.do(lambda: target.copy_(piece, non_blocking=True))
            stream.keep(self._tensor)
            self._stored[id(stream)] = stream, stream.record()

    def __call__(self) -> list[Event]:
        """Return the events behind which the tensor is complete."""
        if self._stored:
            return [event for _, event in self._stored.values()]
        with as_current(self.device):
            # The thread that waits for a message may not be the one that started it.
            self._fence.wait_ready()
            self._copies.store()
            return self._fence.record()


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
    # Memory of a head's length is the host's: what arrives is looked at.
    if fence is not None and _takes_messages(tensor) and tensor.nbytes != HEAD_BYTES:
        fence.synchronize()
        return tensor, fence.device, list
    copies = HostCopies((), (tensor,), fence)
    _, (host,) = copies.load()
    if fence is not None:
        return host, None, StagedTarget(tensor, fence, copies)

    def arrive() -> list[Event]:
        copies.store()
        return []

    return host, None, arrive


def target_of(arrive: Callable[[], list[Event]], tensor: Tensor) -> StagedTarget | None:
    """Return where the pieces of a message go: ``arrive`` of ``to_receive``; None if in place."""
    if not isinstance(arrive, StagedTarget) or tensor.nbytes <= host_copies.PINNED_BYTES:
        return None
    return arrive if buffer.is_plain(tensor) else None


def _ready_fence(device: Device | None, tensor: Tensor) -> StreamFence | None:
    if device is None:
        return None
    fence = StreamFence(device, (tensor,))
    fence.wait_ready()
    return fence


def _takes_messages(tensor: Tensor) -> bool:
    known = capability.known_operations(tensor.device)
    return known.issuperset(_NEEDED) and buffer.is_plain(tensor)
