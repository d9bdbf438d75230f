"""Hierarchical all-reduce: reduce on each node, all-reduce between leaders, copy on each node.

A flat algorithm sends a node's data over the network once for each of its ranks; this one sends it
once. On a node the ranks use memory that all of them map, a piece at a time: each rank copies its
piece in, reduces a shard of all ranks' pieces into the leader's, and copies the result out. The
leaders compute each element's final value and hold the same bits. docs/decisions/0009 has the
measurements; the tuning table decides where the algorithm is used.

Letters: W ranks of the group; N elements of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpidist.comm.algorithms import reduce_op, tuning
from mpidist.comm.algorithms.mpi_types import datatype_and_op
from mpidist.comm.algorithms.pairwise import shard_bounds
from mpidist.comm.algorithms.reduce_op import COMBINE, Reduction
from mpidist.comm.algorithms.shared_memory import shared_maps
from mpidist.comm.memory import buffer
from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.communicator import Communicator, Levels
from mpidist.comm.mpi.library import MPI

# Below this size the latency of the node's barriers exceeds the network's share.
FROM_BYTES = 64 << 10
PIECE_BYTES = 4 << 20


@dataclass
class PieceBuffers:
    """Memory of a node's ranks for two pieces each: one is copied out while the next is copied in.

    Attributes:
        slots: Bytes, by slot and rank on the node.
        count: Number of pieces so far.
    """

    slots: list[list[torch.Tensor]]
    count: int = 0


def is_chosen(comm: Communicator, nbytes: int) -> bool:
    """Return whether the tuning table selects this algorithm for a size; the same on all ranks."""
    if not comm.shares_nodes or nbytes < FROM_BYTES:
        return False
    table = comm.tuning_tables.get(tuning.HOST, tuning.UNMEASURED_HOST)
    return bool(table.choose(nbytes, tuning.HOST_ALGORITHMS) == tuning.LEVELS)


def all_reduce(comm: Communicator, tensor: torch.Tensor, plan: Reduction) -> None:
    """Reduce a contiguous tensor of N elements, of a type that MPI reduces, in place.

    Collective: over the group.
    """
    levels = comm.levels()
    buffers = _piece_buffers(levels)
    flat, step = tensor.view(-1), max(PIECE_BYTES // tensor.element_size(), 1)
    for start, count in buffer.pieces(tensor.numel(), step):
        piece = flat[start : start + count]
        if (
            buffers is None
            or plan.combine not in COMBINE
            or piece.dtype in reduce_op.WITHOUT_ARITHMETIC
        ):
            _by_messages(levels, piece, plan)
        else:
            _in_memory(levels, buffers, piece, plan)
    reduce_op.divide(tensor, plan, comm.size)


def _in_memory(levels: Levels, buffers: PieceBuffers, piece: torch.Tensor, plan: Reduction) -> None:
    node = levels.node
    buffers.count += 1
    slots = [slot[: piece.nbytes].view(piece.dtype) for slot in buffers.slots[buffers.count % 2]]
    slots[node.rank].copy_(piece)
    # After this barrier all pieces are copied in.
    node.mpi.Barrier()
    bounds = shard_bounds(piece.numel(), node.size)
    first, end = bounds[node.rank], bounds[node.rank + 1]
    for other in slots[1:]:
        COMBINE[plan.combine](slots[0][first:end], other[first:end])
    # After this one all shards are reduced.
    node.mpi.Barrier()
    if levels.leaders is not None:
        datatype, op = datatype_and_op(piece.dtype, plan)
        levels.leaders.mpi.Allreduce(
            MPI.IN_PLACE, buffer.elements(slots[0], 0, piece.numel(), datatype), op
        )
    # After this one the result is complete.
    node.mpi.Barrier()
    piece.copy_(slots[0])


def _by_messages(levels: Levels, piece: torch.Tensor, plan: Reduction) -> None:
    datatype, op = datatype_and_op(piece.dtype, plan)
    memory = buffer.elements(piece, 0, piece.numel(), datatype)
    if levels.leaders is None:
        levels.node.mpi.Reduce(memory, None, op, 0)
    else:
        levels.node.mpi.Reduce(MPI.IN_PLACE, memory, op, 0)
        levels.leaders.mpi.Allreduce(MPI.IN_PLACE, memory, op)
    levels.node.mpi.Bcast(memory, 0)


def _piece_buffers(levels: Levels) -> PieceBuffers | None:
    """Return the node's memory; None if its ranks cannot share memory.

    Collective: the first call, over the node.
    """
    kept = levels.node.kept
    if "piece buffers" not in kept:
        maps = shared_maps(levels.node, [2 * PIECE_BYTES] * levels.node.size)
        with autograd_mode.allocating():
            whole = [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps or ()]
        kept["piece buffers"] = (
            PieceBuffers(
                [[part[:PIECE_BYTES] for part in whole], [part[PIECE_BYTES:] for part in whole]]
            )
            if maps
            else None
        )
    found: PieceBuffers | None = kept["piece buffers"]
    return found
