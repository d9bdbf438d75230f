"""Reductions in the order of the ranks, of host and device memory (``MPIDIST_DETERMINISTIC``).

MPI and the ring add contributions in an order that depends on the nodes, the size of the tensor and
the library, and so do the last bits of the result. Here each element is ((r0 + r1) + r2) + ...,
each term in the width of the sum, whatever the nodes. Integers, MIN, MAX and two ranks have one
result in any order and keep their algorithms.

Short tensors are gathered on all ranks, each of which adds all of them; long ones are reduced by
shards (``pairwise``), each by one rank.

Letters: W ranks of the group; N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mpidist.comm.algorithms import pairwise, reduce_op
from mpidist.comm.algorithms.reduce_op import PRODUCT, SUM, ReduceOp, Reduction
from mpidist.comm.algorithms.sendrecv import sendrecv
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.scratch import Scratch

# Up to so many bytes of all ranks, one message fewer costs more than the additions.
GATHER_BYTES = 1 << 20


def applies(comm: Communicator, dtype: torch.dtype, plan: Reduction) -> bool:
    """Return whether the order is set, and the result depends on it."""
    if not comm.adds_in_rank_order or plan.combine not in (SUM, PRODUCT) or comm.size == 1:
        return False
    if dtype.is_complex:
        # A fused product and sum rounds a·b and b·a differently.
        return comm.size > 2 or plan.combine == PRODUCT
    return dtype.is_floating_point and comm.size > 2


def all_reduce(comm: Communicator, flat: torch.Tensor, plan: Reduction) -> None:
    """Reduce a flat host tensor of N elements over all ranks, in place.

    Collective: over the group. Contributions are scaled before (``reduce_op.scale``).
    """
    nbytes = flat.nbytes
    if nbytes * comm.size > GATHER_BYTES:
        pairwise.all_reduce(comm, flat, plan)
    elif nbytes:
        slots = comm.scratch(flat.numel() * comm.size, flat.dtype, Scratch.CONTRIBUTION)
        into = buffer.memory(slots.data_ptr(), slots.nbytes)
        comm.mpi.Allgather(buffer.as_bytes(flat), (into, nbytes, MPI.BYTE))
        pairwise.combine_in_rank_order(comm, flat, slots.view(comm.size, -1), plan)


def prepared(
    comm: Communicator, tensor: torch.Tensor, plan: Reduction
) -> Callable[[torch.Tensor], None] | None:
    """Return ``all_reduce`` prepared for this tensor's memory, size and dtype.

    None where the tensor is not gathered, or nothing can be prepared.
    """
    numel, dtype, nbytes = tensor.numel(), tensor.dtype, tensor.nbytes
    if (
        not 0 < nbytes * comm.size <= GATHER_BYTES
        or plan.factor is not None
        or not (plan.wide is None or dtype in reduce_op.HALVES)
    ):
        return None
    memory = comm.scratch(numel * comm.size, dtype, Scratch.PREPARED_RECEIVED)
    first, *others = memory.view(comm.size, -1)
    total = comm.scratch(numel, plan.wide or dtype, Scratch.PREPARED_WIDE)
    combine, divides, size = reduce_op.COMBINE[plan.combine], plan.divides, comm.size
    mine = buffer.as_bytes(tensor)
    into = (buffer.memory(memory.data_ptr(), memory.nbytes), nbytes, MPI.BYTE)
    allgather = comm.mpi.Allgather

    def gather_and_add(tensor: torch.Tensor) -> None:
        allgather(mine, into)
        total.copy_(first)
        for other in others:
            combine(total, other)
        if divides:
            total.div_(size)
        (tensor if tensor.dim() == 1 else tensor.view(-1)).copy_(total)

    return gather_and_add


def all_reduce_on_device(
    comm: Communicator, fence: StreamFence, flat: torch.Tensor, operation: ReduceOp
) -> None:
    """Reduce a flat device tensor of N elements over all ranks, in place.

    MPI takes device memory (``point_to_point``), and the device adds (``ring.applies``).

    Collective: over the group.

    Blocks: until MPI has returned; the last copy may be in progress on ``fence.device.down``.
    """
    plan = reduce_op.reduction(flat.dtype, operation)
    bounds = pairwise.shard_bounds(flat.numel(), comm.size)
    shards = [flat[bounds[i] : bounds[i + 1]] for i in range(comm.size)]
    reduce_shards_on_device(comm, fence, shards, shards[comm.rank], plan)
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    fence.synchronize()
    sendrecv(
        comm,
        [(peer, shards[comm.rank]) for peer in peers],
        [(peer, shards[peer]) for peer in peers],
    )


def reduce_shards_on_device(
    comm: Communicator,
    fence: StreamFence,
    shards: list[torch.Tensor],
    target: torch.Tensor,
    plan: Reduction,
) -> None:
    """Reduce this rank's shard of W flat device tensors over all ranks into ``target``.

    Collective: over the group, whose shards of one rank have one length.
    """
    device, rank, size = fence.device, comm.rank, comm.size
    scales = plan.factor is not None
    dtype = plan.wide if scales and plan.wide is not None else target.dtype
    sent = [device.empty(shard.numel(), dtype) if scales else shard for shard in shards]
    if scales:
        for copy, shard in zip(sent, shards, strict=True):
            device.down.do(partial(_scaled_copy, copy, shard, plan))
    slots = [device.empty(target.numel() if peer != rank else 0, dtype) for peer in range(size)]
    fence.synchronize()
    peers = [peer for peer in range(size) if peer != rank]
    sendrecv(comm, [(peer, sent[peer]) for peer in peers], [(peer, slots[peer]) for peer in peers])
    slots[rank] = sent[rank]
    total = device.empty(target.numel(), plan.wide or dtype)
    device.down.do(partial(_combine, target, total, slots, plan))
    # The slots may be freed when the device has read them.
    fence.synchronize()


def _scaled_copy(copy: torch.Tensor, shard: torch.Tensor, plan: Reduction) -> None:
    copy.copy_(shard)
    reduce_op.scale(copy, plan)


def _combine(
    target: torch.Tensor, total: torch.Tensor, slots: list[torch.Tensor], plan: Reduction
) -> None:
    total.copy_(slots[0])
    for slot in slots[1:]:
        reduce_op.COMBINE[plan.combine](total, slot.to(total.dtype))
    reduce_op.divide(total, plan, len(slots))
    target.copy_(total)
