"""Pairwise all-reduce and reduce-scatter of contiguous host tensors: each rank reduces one shard.

Each rank receives every other rank's part of its shard, adds the parts in rank order, and sends the
result to all (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, with a
direct exchange instead of the halving). Each element is computed on one rank, so all ranks hold
the same bits.

Letters: W ranks of the group; N elements of a tensor.
"""

from __future__ import annotations

from array import array

import torch

from mpidist.comm.algorithms import reduce_op
from mpidist.comm.algorithms.reduce_op import COMBINE, Reduction
from mpidist.comm.algorithms.sendrecv import pairwise_exchange, sendrecv
from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import LengthError, Receives
from mpidist.comm.mpi.scratch import Scratch
from mpidist.comm.mpi.tags import Tag

# Measured crossovers (docs/decisions/0002): tensors at full width from this size on are reduced by
# shards, on one node with at most RANKS ranks.
FROM_BYTES = 16 << 20
RANKS = 8
# A shard is sent and added in chunks that stay in the cache.
CHUNK_BYTES = 1 << 20


def shard_bounds(numel: int, size: int) -> list[int]:
    """Return W + 1 bounds of W shards of N elements; lengths differ by at most one."""
    return [numel * place // size for place in range(size + 1)]


def are_faster(comm: Communicator, nbytes: int, dtype: torch.dtype, plan: Reduction) -> bool:
    """Return whether reduction by shards is faster than MPI for a tensor at full width."""
    return (
        nbytes >= FROM_BYTES
        and comm.is_single_node
        and comm.size <= RANKS
        and plan.combine in COMBINE
        and dtype not in reduce_op.WITHOUT_ARITHMETIC
    )


def all_reduce(comm: Communicator, flat: torch.Tensor, plan: Reduction) -> None:
    """Reduce a flat tensor of N elements over all ranks, in place."""
    bounds = shard_bounds(flat.numel(), comm.size)
    received = _reduce_shard(
        comm, flat, bounds, plan, flat[bounds[comm.rank] : bounds[comm.rank + 1]]
    )
    if received.is_wrong():
        _refuse(comm, received, (bounds[comm.rank + 1] - bounds[comm.rank]) * flat.element_size())
    parts = [flat[bounds[place] : bounds[place + 1]] for place in range(comm.size)]
    pairwise_exchange(comm, [parts[comm.rank]] * comm.size, parts)


def reduce(comm: Communicator, flat: torch.Tensor, plan: Reduction, root: int) -> None:
    """Reduce a flat tensor of N elements into the root's; other ranks' tensors stay unchanged."""
    bounds = shard_bounds(flat.numel(), comm.size)
    parts = [flat[bounds[place] : bounds[place + 1]] for place in range(comm.size)]
    own = parts[comm.rank]
    mine = (
        own
        if comm.rank == root
        else comm.scratch(own.numel(), own.dtype, Scratch.CONTRIBUTION).copy_(own)
    )
    reduce_shard(comm, flat, bounds, plan, mine)
    if comm.rank == root:
        sendrecv(comm, [], [(peer, parts[peer]) for peer in range(comm.size) if peer != root])
    else:
        sendrecv(comm, [(root, mine)], [])


def reduce_shard(
    comm: Communicator,
    flat: torch.Tensor,
    bounds: list[int],
    plan: Reduction,
    mine: torch.Tensor | None = None,
) -> None:
    """Reduce this rank's shard of ``flat`` over all ranks, in rank order, into ``mine``.

    Args:
        comm: The group's communicator.
        flat: N elements, of which other ranks' shards are sent.
        bounds: W + 1 positions; rank i's shard is ``flat[bounds[i]:bounds[i + 1]]``.
        plan: The reduction.
        mine: This rank's contribution and result; its shard of ``flat`` by default.

    Raises:
        LengthError: A rank's shards have other lengths.
    """
    if mine is None:
        mine = flat[bounds[comm.rank] : bounds[comm.rank + 1]]
    _reduce_shard(comm, flat, bounds, plan, mine).end()


def _reduce_shard(
    comm: Communicator,
    flat: torch.Tensor,
    bounds: list[int],
    plan: Reduction,
    mine: torch.Tensor,
) -> Receives:
    """Do the work of ``reduce_shard``; return its receives, which know wrong lengths."""
    rank, size = comm.rank, comm.size
    itemsize, tag = flat.element_size(), comm.own_tag(Tag.PAIRWISE)
    chunk = max(CHUNK_BYTES // itemsize, 1)
    longest = max(bounds[i + 1] - bounds[i] for i in range(size))
    if longest > chunk:
        # Ranks whose sizes differ may send other numbers of chunks.
        _require_same_size(comm, bounds[-1] * itemsize)
    slots = comm.scratch(min(chunk, longest) * size, flat.dtype).view(size, -1)
    peers = [(rank + distance) % size for distance in range(1, size)]
    base, slots_at, slot_bytes = flat.data_ptr(), slots.data_ptr(), slots.stride(0) * itemsize
    received = Receives(comm)
    for start in range(0, longest, chunk):
        requests = []
        length = max(min(chunk, mine.numel() - start), 0)
        for peer in peers:
            count = max(min(chunk, bounds[peer + 1] - bounds[peer] - start), 0)
            address = base + (bounds[peer] + start) * itemsize
            requests.append(
                comm.mpi.Isend(
                    (buffer.memory(address, count * itemsize), count * itemsize, MPI.BYTE),
                    peer,
                    tag,
                )
            )
        for peer in reversed(peers):
            space = buffer.memory(slots_at + peer * slot_bytes, length * itemsize)
            received.receive((space, length * itemsize, MPI.BYTE), peer, tag)
        comm.wait_all(requests)
        if length:
            combine_in_rank_order(comm, mine[start : start + length], slots[:, :length], plan)
    return received


def _require_same_size(comm: Communicator, nbytes: int) -> None:
    """Compare the sizes of all ranks' tensors.

    Collective: over the group.

    Raises:
        LengthError: They differ (all ranks).
    """
    bounds = array("q", (nbytes, -nbytes))
    comm.mpi.Allreduce(MPI.IN_PLACE, (bounds, 2, MPI.INT64_T), MPI.MAX)
    if bounds[0] + bounds[1]:
        raise LengthError(
            f"the ranks' tensors have {-bounds[1]} to {bounds[0]} bytes, and this rank's has "
            f"{nbytes}"
        )


def _refuse(comm: Communicator, received: Receives, nbytes: int) -> None:
    """Send every rank a result of a wrong length, receive theirs, and raise the first error.

    Another rank may have received the right lengths only, and must not return a number. If the
    sizes of two ranks differ, so do the lengths of a shard, whose rank notices it.

    Args:
        comm: The group's communicator.
        received: The receives of this rank's shard, one from each rank.
        nbytes: Length of this rank's shard.
    """
    rank, size, tag = comm.rank, comm.size, comm.own_tag(Tag.MOVEMENT)
    for distance in range(1, size):
        dest, source = (rank + distance) % size, (rank - distance) % size
        # A rank expects as many bytes of this shard as it has sent.
        length = received.wrong.get(dest, nbytes) + 1
        request = comm.mpi.Isend((bytes(length), length, MPI.BYTE), dest, tag)
        received.receive((bytearray(nbytes), nbytes, MPI.BYTE), source, tag)
        comm.wait_all([request])
    received.end()


def combine_in_rank_order(
    comm: Communicator, mine: torch.Tensor, slots: torch.Tensor, plan: Reduction
) -> None:
    """Reduce all ranks' contributions into ``mine``: ((r0 + r1) + r2) + ..., on any rank.

    Args:
        comm: The group's communicator.
        mine: This rank's contribution, and the result.
        slots: The contributions by rank, overwritten; this rank's is not read.
        plan: The reduction.
    """
    combine = COMBINE[plan.combine]
    if plan.wide is not None and not (comm.size == 2 and reduce_op.rounds_once(mine.dtype, plan)):
        total = comm.scratch(mine.numel(), plan.wide, Scratch.TOTAL)
        term = comm.scratch(mine.numel(), plan.wide, Scratch.TERM)
        for place in range(comm.size):
            source = mine if place == comm.rank else slots[place]
            if place == 0:
                total.copy_(source)
            else:
                combine(total, term.copy_(source))
        reduce_op.divide(total, plan, comm.size)
        mine.copy_(total)
        return
    before = slots[0]
    for place in range(1, comm.rank):
        combine(before, slots[place])
    if comm.rank > 0:
        combine(mine, before)  # the same bits as before + mine
    for place in range(comm.rank + 1, comm.size):
        combine(mine, slots[place])
    reduce_op.divide(mine, plan, comm.size)
