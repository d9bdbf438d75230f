"""Ring all-reduce and reduce-scatter of device memory: MPI sends bytes, the device computes.

Rank i starts the sum of shard i - 1 and sends it to rank i + 1, which adds its own part and sends
the sum on; after W - 1 steps rank i holds the whole sum of shard i, and an all-gather around the
ring distributes the sums (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", JPDC 2009). A shard is sent in chunks: one is added while the next is in flight.
Sums of narrow types are sent in fp32 wherever they would be rounded more than once. Each element is
computed on one rank, so all ranks hold the same bits.

Letters: W ranks of the group; N elements of a tensor.
"""

from __future__ import annotations

from functools import partial

import torch

from mpidist.comm.algorithms import minmax, reduce_op
from mpidist.comm.algorithms.pairwise import shard_bounds
from mpidist.comm.algorithms.reduce_op import COMBINE, SUM, ReduceOp, Reduction
from mpidist.comm.algorithms.ring_schedule import Leg, legs
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Event
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.kernels.accumulate import accumulate
from mpidist.kernels.launch import NAMES

Tensor = torch.Tensor

# Default if the tuning table has no chunk size. On a network, an addition of this size is hidden by
# the transfer; ranks that share one GPU are faster with longer chunks.
CHUNK_BYTES = 16 << 20


def applies(dtype: torch.dtype, plan: Reduction) -> bool:
    """Return whether torch can compute the reduction on a device."""
    if plan.combine not in COMBINE or dtype in (
        torch.bool,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.complex32,
    ):
        return False
    if plan.divides and not (dtype.is_floating_point or dtype.is_complex):
        # Integers are averaged on the host, in NCCL's rounding.
        return False
    return plan.wide is None or dtype in reduce_op.HALVES


def all_reduce(
    comm: Communicator,
    fence: StreamFence,
    flat: Tensor,
    operation: ReduceOp,
    chunk_bytes: int | None = None,
) -> None:
    """Reduce a flat tensor of N elements over all ranks, in place.

    Collective: over the group.

    Blocks: until MPI has returned; the last copy may be in progress on ``fence.device.down``.

    Args:
        comm: The group's communicator.
        fence: The operation's fence.
        flat: The tensor.
        operation: The reduction.
        chunk_bytes: Bytes of one message, the same on all ranks; ``CHUNK_BYTES`` if None.
    """
    plan = reduce_op.reduction(flat.dtype, operation)
    if comm.size == 1:
        fence.device.down.do(partial(reduce_op.scale, flat, plan))
        return
    if minmax.applies(flat.dtype, plan):
        ints = _integers(fence, flat, plan)
        all_reduce(comm, fence, ints, operation, chunk_bytes)
        fence.device.down.do(partial(minmax.decode, ints, flat))
        return
    bounds = shard_bounds(flat.numel(), comm.size)
    shards = [flat[bounds[i] : bounds[i + 1]] for i in range(comm.size)]
    chunk_bytes = chunk_bytes or CHUNK_BYTES
    _reduce_scatter(comm, fence, shards, shards[comm.rank], plan, chunk_bytes)
    _all_gather(comm, shards, chunk_bytes)


def reduce_scatter(
    comm: Communicator,
    fence: StreamFence,
    source: Tensor,
    target: Tensor,
    operation: ReduceOp,
    chunk_bytes: int | None = None,
) -> None:
    """Reduce a flat tensor of W·N elements and keep the rank's N elements in ``target``.

    Collective: over the group.

    Args:
        comm: The group's communicator.
        fence: The operation's fence.
        source: The contribution, which is not changed.
        target: The result.
        operation: The reduction.
        chunk_bytes: As in ``all_reduce``.
    """
    plan = reduce_op.reduction(target.dtype, operation)
    if comm.size == 1:
        fence.device.down.do(partial(_scaled_copy, target, source, plan))
        return
    if minmax.applies(target.dtype, plan):
        ints = _integers(fence, source, plan)
        own = fence.device.empty(target.numel(), ints.dtype)
        reduce_scatter(comm, fence, ints, own, operation, chunk_bytes)
        fence.device.down.do(partial(minmax.decode, own, target))
        return
    shards = list(source.view(comm.size, -1))
    _reduce_scatter(comm, fence, shards, target, plan, chunk_bytes or CHUNK_BYTES)


def _reduce_scatter(
    comm: Communicator,
    fence: StreamFence,
    shards: list[Tensor],
    target: Tensor,
    plan: Reduction,
    chunk_bytes: int,
) -> None:
    device, rank, size = fence.device, comm.rank, comm.size
    sent_dtype = _sent_dtype(target.dtype, plan, size)
    longest = max(shard.numel() for shard in shards)
    route, legs_per_step = _route(size, longest, chunk_bytes // sent_dtype.itemsize, rank - 1)
    first = shards[(rank - 1) % size]
    # A contribution that needs no conversion is sent from its own memory; the last sum of an
    # all-reduce is computed in place.
    is_plain = sent_dtype is target.dtype and plan.factor is None
    ends_in_place = is_plain and target.data_ptr() == shards[rank].data_ptr()
    # A step sends the buffer that the previous step received into: two buffers alternate.
    held = [
        device.empty(longest if step < size - 1 or not is_plain else 0, sent_dtype)
        for step in range(2)
    ]
    if not is_plain:
        device.down.do(partial(_scaled_copy, held[1][: first.numel()], first, plan))
    fence.synchronize()
    messages = _Messages(comm)
    added: list[Event] = []
    for place, leg in enumerate(route):
        if leg.step:
            added[place - legs_per_step].synchronize()
        going = first if is_plain and not leg.step else held[(leg.step + 1) % 2]
        messages.send(_part(going, shards[leg.sent], leg))
        # One receive is posted ahead; its buffer was sent in the previous step.
        for ahead in route[len(messages.receives) : place + 2]:
            messages.sent(len(messages.receives) - legs_per_step)
            messages.receive(_part(held[ahead.step % 2], shards[ahead.received], ahead))
        messages.received(place)
        theirs = _part(held[leg.step % 2], shards[leg.received], leg)
        mine = _part(shards[leg.received], shards[leg.received], leg)
        if ends_in_place and leg.step == size - 2:
            theirs, mine = mine, theirs
        device.down.do(partial(_combine, theirs, mine, plan))
        added.append(device.down.record())
    if not ends_in_place:
        device.down.do(partial(_finish, target, held[(size - 2) % 2][: target.numel()], plan, size))
    elif plan.divides:
        device.down.do(partial(reduce_op.divide, target, plan, size))
    messages.end()
    # The buffers may be freed when neither MPI nor the device uses them.
    fence.synchronize()


def _all_gather(comm: Communicator, shards: list[Tensor], chunk_bytes: int) -> None:
    rank, size = comm.rank, comm.size
    longest = max(shard.numel() for shard in shards)
    chunk = chunk_bytes // shards[0].element_size()
    route, legs_per_step = _route(size, longest, chunk, first_sent=rank)
    messages = _Messages(comm)
    for place, leg in enumerate(route):
        for ahead in route[len(messages.receives) : place + 2]:
            messages.receive(_part(shards[ahead.received], shards[ahead.received], ahead))
        if leg.step:
            messages.received(place - legs_per_step)
        messages.send(_part(shards[leg.sent], shards[leg.sent], leg))
    messages.end()


class _Messages:
    """Messages with the two neighbours, in order."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._tag = comm.own_tag(Tag.RING)
        self._left, self._right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self.sends: list[MPI.Request | None] = []
        self.receives: list[MPI.Request | None] = []

    def send(self, part: Tensor) -> None:
        self.sends.append(self._comm.mpi.Isend(buffer.as_bytes(part), self._right, self._tag))

    def receive(self, part: Tensor) -> None:
        self.receives.append(self._comm.mpi.Irecv(buffer.as_bytes(part), self._left, self._tag))

    def sent(self, place: int) -> None:
        self._wait(self.sends, place)

    def received(self, place: int) -> None:
        self._wait(self.receives, place)

    def end(self) -> None:
        self._comm.wait_all(
            [request for request in (*self.sends, *self.receives) if request is not None]
        )

    def _wait(self, requests: list[MPI.Request | None], place: int) -> None:
        if place >= 0 and (request := requests[place]) is not None:
            request.Wait()
            requests[place] = None


def _integers(fence: StreamFence, flat: Tensor, plan: Reduction) -> Tensor:
    ints = fence.device.empty(flat.numel(), minmax.INTEGERS[flat.element_size()])
    fence.device.down.do(lambda: ints.copy_(minmax.encode(flat, plan)))
    return ints


def _route(size: int, longest: int, chunk: int, first_sent: int) -> tuple[list[Leg], int]:
    """Return the legs around the ring, and their number in one step."""
    chunk = max(chunk, 1)
    return legs(size, longest, chunk, first_sent % size), -(-longest // chunk)


def _part(memory: Tensor, shard: Tensor, leg: Leg) -> Tensor:
    return memory[leg.start : min(leg.start + leg.numel, shard.numel())]


def _sent_dtype(dtype: torch.dtype, plan: Reduction, size: int) -> torch.dtype:
    if plan.wide is None or (
        size == 2 and reduce_op.rounds_once(dtype, plan) and plan.factor is None
    ):
        return dtype
    return plan.wide


def _scaled_copy(target: Tensor, source: Tensor, plan: Reduction) -> None:
    target.copy_(source)
    reduce_op.scale(target, plan)


def _combine(theirs: Tensor, mine: Tensor, plan: Reduction) -> None:
    # The result is in ``theirs``; ``mine`` is widened.
    if plan.factor is not None:
        mine = mine.to(theirs.dtype) * plan.factor
    if plan.combine == SUM and theirs.dtype in NAMES and mine.dtype in NAMES:
        accumulate(theirs, mine)
    else:
        COMBINE[plan.combine](theirs, mine.to(theirs.dtype))


def _finish(target: Tensor, total: Tensor, plan: Reduction, size: int) -> None:
    reduce_op.divide(total, plan, size)
    target.copy_(total)
