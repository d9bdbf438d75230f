"""Collectives with arithmetic, over contiguous host tensors: all_reduce, reduce, reduce_scatter.

MPI's own reductions serve every type that MPI can add. Four cases are ours:

* ``narrow`` types accumulate in fp32.
* ``extremes`` (MIN and MAX) of floating-point numbers go as integers, because MPI leaves open what becomes of NaN.
* Large tensors within a node go by ``shards``: MPI libraries allocate a temporary of the tensor's size in each call, and its page
  faults cost more than the transfer (docs/decisions/0002 has the figures).
* Counts past ``MAX_COUNT`` elements are cut.

Letters: W ranks of the group; N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.comm import arithmetic, buffer, extremes, narrow, operations, shards
from mpidist.comm.arithmetic import Operation, Reduction
from mpidist.comm.communicator import Communicator
from mpidist.comm.library import MPI

Tensors = Sequence[torch.Tensor]

COALESCE_BYTES = 64 << 10  # tensors up to this size are cheaper to copy into one than to reduce one by one (docs/decisions/0002)


def all_reduce(comm: Communicator, inputs: Tensors, outputs: Tensors, operation: Operation) -> None:
    """Reduce each tensor over all ranks, in place."""
    for tensor in outputs:
        plan = arithmetic.reduction(tensor.dtype, operation)
        arithmetic.scale(tensor, plan)
        if comm.size == 1:
            continue
        if extremes.applies(tensor.dtype, plan):
            ints = extremes.encode(tensor, plan)
            all_reduce(comm, (), (ints,), operation)
            extremes.decode(ints, tensor)
            continue
        if plan.wide is not None:
            narrow.all_reduce(comm, tensor.view(-1), plan)
            continue
        if shards.are_faster(comm, tensor.nbytes, tensor.dtype, plan):
            shards.all_reduce(comm, tensor.view(-1), plan)
            continue
        datatype, op = operations.types_of(tensor.dtype, plan)
        for start, count in buffer.pieces(tensor.numel()):
            comm.mpi.Allreduce(MPI.IN_PLACE, buffer.elements(tensor, start, count, datatype), op)
        arithmetic.divide(tensor, plan, comm.size)


def is_one_call(comm: Communicator, tensor: torch.Tensor, plan: Reduction) -> bool:
    """Say whether an all-reduce of a real-valued tensor is one call of MPI on its own memory and nothing else."""
    return (
        plan.wide is None
        and plan.factor is None
        and not plan.divides
        and not extremes.applies(tensor.dtype, plan)
        and tensor.dtype in buffer.datatypes()
        and tensor.dtype is not torch.bool
        and tensor.numel() <= buffer.MAX_COUNT
        and not shards.are_faster(comm, tensor.nbytes, tensor.dtype, plan)
    )


def all_reduce_flat(comm: Communicator, inputs: Tensors, outputs: Tensors, operation: Operation) -> None:
    """Reduce tensors of one dtype over all ranks, in place; short ones together, as one flat tensor."""
    short = [t for t in outputs if t.nbytes <= COALESCE_BYTES]
    if len(short) > 1 and comm.size > 1:
        counts = [t.numel() for t in short]
        flat = comm.scratch(sum(counts), short[0].dtype, slot=4)
        parts = flat.split(counts)
        for part, tensor in zip(parts, short, strict=True):
            part.copy_(tensor.view(-1))
        all_reduce(comm, (), (flat,), operation)
        for part, tensor in zip(parts, short, strict=True):
            tensor.view(-1).copy_(part)
        outputs = [t for t in outputs if t.nbytes > COALESCE_BYTES]
    all_reduce(comm, (), outputs, operation)


def reduce(comm: Communicator, inputs: Tensors, outputs: Tensors, operation: Operation, root: int) -> None:
    """Reduce to the root's tensor; the others' stay as they were."""
    (tensor,) = inputs
    plan = arithmetic.reduction(tensor.dtype, operation)
    if extremes.applies(tensor.dtype, plan):
        ints = extremes.encode(tensor, plan)
        reduce(comm, (ints,), (ints,), operation, root)
        if comm.rank == root:
            extremes.decode(ints, tensor)
        return
    flat = tensor.view(-1)
    if comm.size > 1 and plan.factor is None and shards.are_faster(comm, flat.nbytes, flat.dtype, plan):
        shards.reduce(comm, flat, plan, root)
        return
    for start, count in buffer.pieces(flat.numel(), _piece_numel(plan)):
        part = flat[start : start + count]
        work = part
        if plan.wide is not None:
            work = comm.scratch(count, plan.wide).copy_(part)
        elif plan.factor is not None and comm.rank != root:
            work = comm.scratch(count, part.dtype).copy_(part)
        arithmetic.scale(work, plan)
        datatype, op = operations.types_of(work.dtype, plan)
        spec = buffer.elements(work, 0, count, datatype)
        if comm.rank == root:
            comm.mpi.Reduce(MPI.IN_PLACE, spec, op, root)
            arithmetic.divide(work, plan, comm.size)
            if work is not part:
                part.copy_(work)
        else:
            comm.mpi.Reduce(spec, None, op, root)


def reduce_scatter(comm: Communicator, inputs: Tensors, outputs: Tensors, operation: Operation) -> None:
    """Reduce W equal tensors a rank and keep the rank's own: W inputs of N elements, one output of N elements."""
    (target,) = outputs
    held = comm.scratch(target.numel() * comm.size, target.dtype, slot=1)
    for part, tensor in zip(held.view(comm.size, -1), inputs, strict=True):
        part.copy_(tensor.view(-1))
    _reduce_scatter_flat(comm, held, target.view(-1), operation, may_write=True)


def reduce_scatter_tensor(comm: Communicator, inputs: Tensors, outputs: Tensors, operation: Operation) -> None:
    """Reduce a tensor of W·N elements and keep the rank's own N; pairs of input and output."""
    for source, target in zip(inputs, outputs, strict=True):
        _reduce_scatter_flat(comm, source.view(-1), target.view(-1), operation, may_write=False)


def _reduce_scatter_flat(
    comm: Communicator, source: torch.Tensor, target: torch.Tensor, operation: Operation, may_write: bool
) -> None:
    plan = arithmetic.reduction(target.dtype, operation)
    count = target.numel()
    if plan.factor is not None:
        source = source if may_write else source.clone()
        arithmetic.scale(source, plan)
    in_place = source.data_ptr() + comm.rank * target.nbytes == target.data_ptr()
    if comm.size == 1:
        target.copy_(source)
        return
    if extremes.applies(target.dtype, plan):
        ints = extremes.encode(source, plan)
        own = torch.empty_like(ints[:count])
        _reduce_scatter_flat(comm, ints, own, operation, may_write=True)
        extremes.decode(own, target)
        return
    if plan.wide is not None or shards.are_faster(comm, source.nbytes, target.dtype, plan):
        if not in_place:
            target.copy_(source[comm.rank * count : (comm.rank + 1) * count])
        bounds = [place * count for place in range(comm.size + 1)]
        shards.reduce_shard(comm, source, bounds, plan, mine=target)
        return
    datatype, op = operations.types_of(target.dtype, plan)
    if count * comm.size <= buffer.MAX_COUNT:
        send = (buffer.memory(source.data_ptr(), source.nbytes), count, datatype)  # mpi4py counts one block
        into = target
        if in_place:  # MPI forbids overlap, and its own in-place form would leave the result elsewhere
            into = comm.scratch(count, target.dtype)
        comm.mpi.Reduce_scatter_block(send, buffer.elements(into, 0, count, datatype), op)
        if into is not target:
            target.copy_(into)
    else:
        for root in range(comm.size):
            for start, length in buffer.pieces(count):
                send = buffer.elements(source, root * count + start, length, datatype)
                if comm.rank != root:
                    comm.mpi.Reduce(send, None, op, root)
                    continue
                into = comm.scratch(length, target.dtype)
                comm.mpi.Reduce(send, buffer.elements(into, 0, length, datatype), op, root)
                target[start : start + length].copy_(into)
    arithmetic.divide(target, plan, comm.size)


def _piece_numel(plan: Reduction) -> int | None:
    # Narrow types pass through a buffer of bounded size.
    return None if plan.wide is None and plan.factor is None else 1 << 20
