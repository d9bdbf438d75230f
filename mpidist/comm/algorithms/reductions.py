"""Collectives with arithmetic, over contiguous host tensors: all_reduce, reduce, reduce_scatter.

MPI reduces every type that it can add. Integers wrap around, as in torch: sums of 8 and 16 bits use
an operation of this library (``mpi_types``). Other algorithms serve five cases:

* Low-precision types are accumulated in fp32 (``low_precision``).
* MIN and MAX of floating-point numbers are computed on integers, because MPI leaves NaN open
  (``minmax``).
* Large tensors within a node are reduced by shards (``pairwise``): MPI libraries allocate a
  temporary of the tensor's size in each call, and its page faults cost more than the transfer
  (docs/decisions/0002 has the figures).
* With ``MPIDIST_DETERMINISTIC=order`` fractional numbers are added in the order of the ranks
  (``rank_order``).
* Counts past ``MAX_COUNT`` elements are split.

Letters: W ranks of the group; N elements of a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import accumulate

import torch

from mpidist.comm.algorithms import (
    low_precision,
    minmax,
    mpi_types,
    pairwise,
    rank_order,
    reduce_op,
)
from mpidist.comm.algorithms.reduce_op import ReduceOp, Reduction
from mpidist.comm.memory import buffer
from mpidist.comm.memory.overlap import separated
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.scratch import Scratch

Tensors = Sequence[torch.Tensor]

# Up to this size, copying tensors into one is cheaper than reducing them one by one
# (docs/decisions/0002).
COALESCE_BYTES = 64 << 10


def all_reduce(comm: Communicator, inputs: Tensors, outputs: Tensors, operation: ReduceOp) -> None:
    """Reduce each tensor over all ranks, in place."""
    for tensor in outputs:
        plan = reduce_op.reduction(tensor.dtype, operation)
        if plan.wide is not None and plan.factor is not None:
            _all_reduce_scaled(comm, tensor.view(-1), plan, plan.wide)
            continue
        reduce_op.scale(tensor, plan)
        if comm.size == 1:
            continue
        if minmax.applies(tensor.dtype, plan):
            ints = minmax.encode(tensor, plan)
            all_reduce(comm, (), (ints,), operation)
            minmax.decode(ints, tensor)
            continue
        if rank_order.applies(comm, tensor.dtype, plan):
            rank_order.all_reduce(comm, tensor.view(-1), plan)
            continue
        if plan.wide is not None:
            low_precision.all_reduce(comm, tensor.view(-1), plan)
            continue
        if pairwise.are_faster(comm, tensor.nbytes, tensor.dtype, plan):
            pairwise.all_reduce(comm, tensor.view(-1), plan)
            continue
        datatype, op = mpi_types.datatype_and_op(tensor.dtype, plan)
        for start, count in buffer.pieces(tensor.numel()):
            comm.mpi.Allreduce(MPI.IN_PLACE, buffer.elements(tensor, start, count, datatype), op)
        reduce_op.divide(tensor, plan, comm.size)


def _all_reduce_scaled(
    comm: Communicator, flat: torch.Tensor, plan: Reduction, dtype: torch.dtype
) -> None:
    # A product in the narrow type would be rounded before the sum.
    for start, count in buffer.pieces(flat.numel(), _piece_numel(plan)):
        part = flat[start : start + count]
        wide = comm.scratch(count, dtype, Scratch.SCALED).copy_(part)
        reduce_op.scale(wide, plan)
        all_reduce(comm, (), (wide,), plan.combine)
        part.copy_(wide)


def is_one_call(comm: Communicator, tensor: torch.Tensor, plan: Reduction) -> bool:
    """Return whether an all-reduce is exactly one MPI call on the tensor's own memory."""
    return (
        plan.wide is None
        and plan.factor is None
        and not plan.divides
        and not minmax.applies(tensor.dtype, plan)
        and not rank_order.applies(comm, tensor.dtype, plan)
        and tensor.dtype in mpi_types.datatypes()
        and tensor.dtype is not torch.bool
        and tensor.numel() <= buffer.MAX_COUNT
        and not pairwise.are_faster(comm, tensor.nbytes, tensor.dtype, plan)
    )


def all_reduce_flat(
    comm: Communicator, inputs: Tensors, outputs: Tensors, operation: ReduceOp
) -> None:
    """Reduce tensors of one dtype over all ranks, in place; short ones as one flat tensor."""
    short = [t for t in outputs if t.nbytes <= COALESCE_BYTES]
    if len(short) > 1 and comm.size > 1:
        counts = [t.numel() for t in short]
        flat = comm.scratch(sum(counts), short[0].dtype, Scratch.COALESCED)
        parts = flat.split(counts)
        for part, tensor in zip(parts, short, strict=True):
            part.copy_(tensor.view(-1))
        all_reduce(comm, (), (flat,), operation)
        for part, tensor in zip(parts, short, strict=True):
            tensor.view(-1).copy_(part)
        outputs = [t for t in outputs if t.nbytes > COALESCE_BYTES]
    all_reduce(comm, (), outputs, operation)


def reduce(
    comm: Communicator, inputs: Tensors, outputs: Tensors, operation: ReduceOp, root: int
) -> None:
    """Reduce into the root's tensor; other ranks' tensors stay unchanged."""
    (tensor,) = inputs
    plan = reduce_op.reduction(tensor.dtype, operation)
    if minmax.applies(tensor.dtype, plan):
        ints = minmax.encode(tensor, plan)
        reduce(comm, (ints,), (ints,), operation, root)
        if comm.rank == root:
            minmax.decode(ints, tensor)
        return
    flat = tensor.view(-1)
    if rank_order.applies(comm, flat.dtype, plan):
        _reduce_in_rank_order(comm, flat, plan, root)
        return
    if (
        comm.size > 1
        and plan.factor is None
        and pairwise.are_faster(comm, flat.nbytes, flat.dtype, plan)
    ):
        pairwise.reduce(comm, flat, plan, root)
        return
    for start, count in buffer.pieces(flat.numel(), _piece_numel(plan)):
        part = flat[start : start + count]
        work = part
        if plan.wide is not None:
            work = comm.scratch(count, plan.wide).copy_(part)
        elif plan.factor is not None and comm.rank != root:
            work = comm.scratch(count, part.dtype).copy_(part)
        reduce_op.scale(work, plan)
        datatype, op = mpi_types.datatype_and_op(work.dtype, plan)
        spec = buffer.elements(work, 0, count, datatype)
        if comm.rank == root:
            comm.mpi.Reduce(MPI.IN_PLACE, spec, op, root)
            reduce_op.divide(work, plan, comm.size)
            if work is not part:
                part.copy_(work)
        else:
            comm.mpi.Reduce(spec, None, op, root)


def _reduce_in_rank_order(
    comm: Communicator, flat: torch.Tensor, plan: Reduction, root: int
) -> None:
    if plan.factor is None:
        pairwise.reduce(comm, flat, plan, root)
        return
    # A product in the narrow type would be rounded before the sum.
    scaled = comm.scratch(flat.numel(), plan.wide or flat.dtype, Scratch.SCALED).copy_(flat)
    reduce_op.scale(scaled, plan)
    pairwise.reduce(comm, scaled, reduce_op.reduction(scaled.dtype, plan.combine), root)
    if comm.rank == root:
        flat.copy_(scaled)


def reduce_scatter(
    comm: Communicator, inputs: Tensors, outputs: Tensors, operation: ReduceOp
) -> None:
    """Reduce W tensors, whose sizes may differ, and keep the rank-th in the output."""
    (target,) = outputs
    bounds = [0, *accumulate(t.numel() for t in inputs)]
    held = comm.scratch(bounds[-1], target.dtype, Scratch.CONTRIBUTION)
    for (start, end), tensor in zip(itertools.pairwise(bounds), inputs, strict=True):
        held[start:end].copy_(tensor.view(-1))
    _reduce_scatter_flat(comm, held, target.view(-1), bounds, operation, may_write=True)


def reduce_scatter_tensor(
    comm: Communicator, inputs: Tensors, outputs: Tensors, operation: ReduceOp
) -> None:
    """Reduce tensors of W·N elements and keep the rank's N elements in each output."""
    for source, target in zip(separated(inputs, outputs), outputs, strict=True):
        bounds = [place * target.numel() for place in range(comm.size + 1)]
        _reduce_scatter_flat(
            comm, source.view(-1), target.view(-1), bounds, operation, may_write=False
        )


def _reduce_scatter_flat(
    comm: Communicator,
    source: torch.Tensor,
    target: torch.Tensor,
    bounds: list[int],
    operation: ReduceOp,
    may_write: bool,
) -> None:
    """Reduce a flat tensor and keep ``source[bounds[rank]:bounds[rank + 1]]`` in ``target``.

    ``source`` is overwritten only if ``may_write``.
    """
    plan = reduce_op.reduction(target.dtype, operation)
    if plan.factor is not None:
        if plan.wide is not None:
            # A product in the narrow type would be rounded before the sum.
            source, own = source.to(plan.wide), torch.empty_like(target, dtype=plan.wide)
            reduce_op.scale(source, plan)
            _reduce_scatter_flat(comm, source, own, bounds, plan.combine, may_write=True)
            target.copy_(own)
            return
        source = source if may_write else source.clone()
        reduce_op.scale(source, plan)
    mine = source[bounds[comm.rank] : bounds[comm.rank + 1]]
    if comm.size == 1:
        target.copy_(mine)
        return
    if minmax.applies(target.dtype, plan):
        ints = minmax.encode(source, plan)
        own = torch.empty_like(ints[: target.numel()])
        _reduce_scatter_flat(comm, ints, own, bounds, operation, may_write=True)
        minmax.decode(own, target)
        return
    if (
        plan.wide is not None
        or pairwise.are_faster(comm, source.nbytes, target.dtype, plan)
        or rank_order.applies(comm, target.dtype, plan)
    ):
        target.copy_(mine)
        pairwise.reduce_shard(comm, source, bounds, plan, mine=target)
        return
    _reduce_scatter_by_mpi(comm, source, target, bounds, plan)
    reduce_op.divide(target, plan, comm.size)


def _reduce_scatter_by_mpi(
    comm: Communicator,
    source: torch.Tensor,
    target: torch.Tensor,
    bounds: list[int],
    plan: Reduction,
) -> None:
    datatype, op = mpi_types.datatype_and_op(target.dtype, plan)
    if source.numel() > buffer.MAX_COUNT:
        for root, (first, end) in enumerate(itertools.pairwise(bounds)):
            for start, length in buffer.pieces(end - first):
                send = buffer.elements(source, first + start, length, datatype)
                if comm.rank == root:
                    comm.mpi.Reduce(
                        send, buffer.elements(target, start, length, datatype), op, root
                    )
                else:
                    comm.mpi.Reduce(send, None, op, root)
        return
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    memory = buffer.memory(source.data_ptr(), source.nbytes)
    received = buffer.elements(target, 0, target.numel(), datatype)
    if min(counts) == max(counts):
        # mpi4py takes the count of one block.
        comm.mpi.Reduce_scatter_block((memory, counts[0], datatype), received, op)
    else:
        comm.mpi.Reduce_scatter((memory, source.numel(), datatype), received, counts, op)


def _piece_numel(plan: Reduction) -> int | None:
    # Widened and scaled copies use scratch memory of bounded size.
    return None if plan.wide is None and plan.factor is None else 1 << 20
