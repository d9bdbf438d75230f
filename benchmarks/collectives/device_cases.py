"""Transfers of device tensors under test: all-reduce and ping-pong, and checks of the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from harness.timing import Contender
from mpidist.comm import SUM
from mpidist.comm.algorithms import device_all_reduce, host_copies, tuning
from mpidist.comm.algorithms.host_copies import HostCopies
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device
from mpidist.comm.messages.device_p2p import StagedSource, StagedTarget
from mpidist.comm.messages.message_pieces import PieceTransfers
from mpidist.comm.messages.posted_receives import ReceiveQueue
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.nonblocking import Request

Tensor = torch.Tensor


_TAG = 1


@dataclass(frozen=True)
class Place:
    """This rank, its device, and MPI's abilities on that device."""

    comm: Communicator
    device: torch.device
    # The device as mpidist.comm represents it.
    queues: Device
    # MPI operations that accept device memory.
    able: frozenset[str]
    # Long staged messages.
    pieces: PieceTransfers

    def contribution(self, numel: int, rank: int) -> Tensor:
        """Return a rank's contribution, in values whose sum is exact."""
        return (torch.arange(numel, device=self.device) % 1000 + rank).float()


def all_reduce(place: Place, numel: int) -> list[Contender]:
    """Return the available all-reduce algorithms, on one tensor."""
    tensor = torch.zeros(numel, device=place.device)
    kind = (tensor.dtype, tensor.nbytes, SUM, place.device)
    able = device_all_reduce.able_algorithms(place.comm, tensor.dtype, SUM, place.device)
    calls = {
        name: partial(_reduced, place, device_all_reduce.algorithm(place.comm, *kind, name), tensor)
        for name in able
    }
    return [Contender(name, (call,), (tensor,)) for name, call in calls.items()]


def _reduced(place: Place, reduce: Callable[..., None], tensor: Tensor) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    reduce(place.comm, fence, tensor, SUM)
    _finish(fence)


def is_sum(place: Place, contender: Contender) -> bool:
    """Return whether an all-reduce yields the sum of all contributions."""
    (tensor,) = contender.outputs
    tensor.copy_(place.contribution(tensor.numel(), place.comm.rank))
    contender.calls[0]()
    truth = torch.stack(
        [place.contribution(tensor.numel(), rank) for rank in range(place.comm.size)]
    ).sum(0)
    return torch.equal(tensor, truth)


def ping_pong(place: Place, numel: int) -> list[Contender]:
    """Send from rank 0 to rank 1 and back; a call is one way."""
    out, back = place.contribution(numel, 7), torch.zeros(numel, device=place.device)
    ways = {tuning.LIBRARY: (_send, _receive), tuning.STAGED: (_send_staged, _receive_staged)}
    if "point_to_point" not in place.able:
        del ways[tuning.LIBRARY]
    contenders = []
    for name, (send, receive) in ways.items():
        calls: tuple[Callable[[], object], ...] = ()
        if place.comm.rank == 0:
            calls = partial(send, place, out, 1), partial(receive, place, back, 1)
        elif place.comm.rank == 1:
            calls = partial(receive, place, back, 0), partial(send, place, back, 0)
        contenders.append(Contender(name, calls, (back,)))
    return contenders


def _send(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    fence.synchronize()
    place.comm.mpi.Send(buffer.as_bytes(tensor), peer, _TAG)


def _receive(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    fence.synchronize()
    place.comm.mpi.Recv(buffer.as_bytes(tensor), peer, _TAG)


def _send_staged(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    if tensor.nbytes <= host_copies.PINNED_BYTES:
        (host,), _ = HostCopies((tensor,), (), fence).load()
        place.comm.mpi.Send(buffer.as_bytes(host), peer, _TAG)
        return
    fence.synchronize()
    source = StagedSource(place.queues, tensor, tensor)
    for request in place.pieces.send(source, list(buffer.pieces(tensor.nbytes)), peer, _TAG) or ():
        _await(request)


def _receive_staged(place: Place, tensor: Tensor, peer: int) -> None:
    fence = StreamFence(place.queues, (tensor,))
    fence.wait_ready()
    copies = HostCopies((), (tensor,), fence)
    _, (host,) = copies.load()
    if tensor.nbytes <= host_copies.PINNED_BYTES:
        place.comm.mpi.Recv(buffer.as_bytes(host), peer, _TAG)
        copies.store()
        _finish(fence)
        return
    target = StagedTarget(tensor, fence, copies)
    receives = ReceiveQueue(place.comm.mpi, place.pieces)
    for start, length in buffer.pieces(tensor.nbytes):
        space = buffer.byte_range(host, start, length)
        receive = receives.post(space, peer, _TAG, True, None, (target, start))
        _await(receive)
        if receive.error is not None:
            raise receive.error
    for event in target():
        event.synchronize()


def _await(request: Request) -> None:
    while not request.Test():
        pass


def _finish(fence: StreamFence) -> None:
    for event in fence.record():
        event.synchronize()


def is_back(place: Place, contender: Contender) -> bool:
    """Return whether the message returns unchanged."""
    (back,) = contender.outputs
    back.fill_(-1)
    for call in contender.calls:
        call()
    return place.comm.rank > 1 or torch.equal(back, place.contribution(back.numel(), 7))
