"""Collectives with arithmetic, over contiguous host tensors: all_reduce, reduce, reduce_scatter.

MPI's own reductions serve every type that MPI can add. Three cases are ours:

* Narrow types (fp16, bf16, fp8) accumulate in fp32: short tensors are widened and reduced by MPI; longer ones travel narrow,
  by *shards*: each rank gets every other rank's piece of its shard, adds them up in rank order, and gives the result to all
  (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, with a direct exchange in place of the halving).
  Each element is computed on one rank, so all ranks hold the same bits.
* Large tensors within a node take the same way at full width: MPI libraries allocate a temporary of the tensor's size in each
  call, and its page faults cost more than the transfer (docs/decisions/0002 has the figures).
* Counts past ``MAX_COUNT`` elements are cut.

Letters: W ranks of the group; N elements of a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpidist.comm import arithmetic, buffer, movement
from mpidist.comm.arithmetic import Operation, Reduction
from mpidist.comm.communicator import Communicator
from mpidist.comm.door import wait_all
from mpidist.comm.library import MPI

Tensors = Sequence[torch.Tensor]

_TAG = 1
_HALVES = (torch.float16, torch.bfloat16)
# Measured crossovers, docs/decisions/0002.
SHARDS_BYTES = 16 << 20  # full-width tensors from this size on go by shards, on one node of at most SHARDS_RANKS ranks
SHARDS_RANKS = 8
WHOLE_BYTES = 128 << 10  # two ranks exchange a narrow tensor as a whole up to this size
WIDEN_NUMEL = 1 << 16  # more ranks widen a narrow tensor up to this many elements
COALESCE_BYTES = 64 << 10  # tensors up to this size are cheaper to copy into one than to reduce one by one
CHUNK_BYTES = 1 << 20  # a shard travels and is added in chunks that stay in the cache


@functools.cache
def mpi_operations() -> dict[str, Any]:
    """Return MPI's name of each combination."""
    return {
        arithmetic.SUM: MPI.SUM,
        arithmetic.PRODUCT: MPI.PROD,
        arithmetic.MIN: MPI.MIN,
        arithmetic.MAX: MPI.MAX,
        arithmetic.BAND: MPI.BAND,
        arithmetic.BOR: MPI.BOR,
        arithmetic.BXOR: MPI.BXOR,
    }


@functools.cache
def _bool_operations() -> dict[str, Any]:
    # A sum of booleans is "any of them", as NCCL and torch's own convert it; a product is "all of them".
    return {
        arithmetic.SUM: MPI.LOR,
        arithmetic.MAX: MPI.LOR,
        arithmetic.BOR: MPI.LOR,
        arithmetic.PRODUCT: MPI.LAND,
        arithmetic.MIN: MPI.LAND,
        arithmetic.BAND: MPI.LAND,
        arithmetic.BXOR: MPI.LXOR,
    }


# In-place twins of MPI's operations, for what we add up ourselves.
_COMBINE = {
    arithmetic.SUM: torch.Tensor.add_,
    arithmetic.PRODUCT: torch.Tensor.mul_,
    arithmetic.MIN: lambda a, b: torch.minimum(a, b, out=a),
    arithmetic.MAX: lambda a, b: torch.maximum(a, b, out=a),
}


def all_reduce(comm: Communicator, inputs: Tensors, outputs: Tensors, operation: Operation) -> None:
    """Reduce each tensor over all ranks, in place."""
    for tensor in outputs:
        plan = arithmetic.reduction(tensor.dtype, operation)
        _scale(tensor, plan)
        if comm.size == 1:
            continue
        if plan.wide is not None:
            _narrow_all_reduce(comm, tensor.view(-1), plan)
            continue
        if _by_shards(comm, tensor.nbytes, tensor.dtype, plan):
            bounds = shard_bounds(tensor.numel(), comm.size)
            flat = tensor.view(-1)
            _reduce_shards(comm, flat, bounds, plan)
            _divide(flat[bounds[comm.rank] : bounds[comm.rank + 1]], plan, comm.size)
            _gather_shards(comm, flat, bounds)
            continue
        datatype, op = _mpi_types(tensor.dtype, plan)
        for start, count in buffer.pieces(tensor.numel()):
            comm.mpi.Allreduce(MPI.IN_PLACE, buffer.elements(tensor, start, count, datatype), op)
        _divide(tensor, plan, comm.size)


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
    flat = tensor.view(-1)
    for start, count in buffer.pieces(flat.numel(), _piece_numel(plan)):
        part = flat[start : start + count]
        work = part
        if plan.wide is not None:
            work = comm.scratch(count, plan.wide).copy_(part)
        elif plan.factor is not None and comm.rank != root:
            work = comm.scratch(count, part.dtype).copy_(part)
        _scale(work, plan)
        datatype, op = _mpi_types(work.dtype, plan)
        spec = buffer.elements(work, 0, count, datatype)
        if comm.rank == root:
            comm.mpi.Reduce(MPI.IN_PLACE, spec, op, root)
            _divide(work, plan, comm.size)
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


def shard_bounds(numel: int, size: int) -> list[int]:
    """Cut N elements into W shards whose lengths differ by one at most; returns W + 1 bounds."""
    return [numel * place // size for place in range(size + 1)]


def is_one_call(comm: Communicator, tensor: torch.Tensor, plan: Reduction) -> bool:
    """Say whether an all-reduce of a real-valued tensor is one call of MPI on its own memory and nothing else."""
    return (
        plan.wide is None
        and plan.factor is None
        and not plan.divides
        and tensor.dtype in buffer.datatypes()
        and tensor.dtype is not torch.bool
        and tensor.numel() <= buffer.MAX_COUNT
        and not _by_shards(comm, tensor.nbytes, tensor.dtype, plan)
    )


def _by_shards(comm: Communicator, nbytes: int, dtype: torch.dtype, plan: Reduction) -> bool:
    # torch has no arithmetic for the wider unsigned types, and booleans are no numbers.
    return (
        nbytes >= SHARDS_BYTES
        and comm.is_single_node
        and comm.size <= SHARDS_RANKS
        and plan.combine in _COMBINE
        and dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)
    )


def _reduce_scatter_flat(
    comm: Communicator, source: torch.Tensor, target: torch.Tensor, operation: Operation, may_write: bool
) -> None:
    plan = arithmetic.reduction(target.dtype, operation)
    count = target.numel()
    if plan.factor is not None:
        source = source if may_write else source.clone()
        _scale(source, plan)
    in_place = source.data_ptr() + comm.rank * target.nbytes == target.data_ptr()
    if comm.size == 1:
        target.copy_(source)
        return
    if plan.wide is not None or _by_shards(comm, source.nbytes, target.dtype, plan):
        if not in_place:
            target.copy_(source[comm.rank * count : (comm.rank + 1) * count])
        bounds = [place * count for place in range(comm.size + 1)]
        _reduce_shards(comm, source, bounds, plan, mine=target)
        if plan.wide is None:
            _divide(target, plan, comm.size)
        return
    datatype, op = _mpi_types(target.dtype, plan)
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
    _divide(target, plan, comm.size)


def _narrow_all_reduce(comm: Communicator, flat: torch.Tensor, plan: Reduction) -> None:
    assert plan.wide is not None
    numel = flat.numel()
    if comm.size == 2 and flat.nbytes <= WHOLE_BYTES and flat.dtype in _HALVES:
        _exchange_whole(comm, flat, plan)
    elif numel <= WIDEN_NUMEL or plan.combine not in _COMBINE:
        wide = comm.scratch(numel, plan.wide).copy_(flat)
        datatype, op = _mpi_types(plan.wide, plan)
        comm.mpi.Allreduce(MPI.IN_PLACE, buffer.elements(wide, 0, numel, datatype), op)
        _divide(wide, plan, comm.size)
        flat.copy_(wide)
    else:
        bounds = shard_bounds(numel, comm.size)
        _reduce_shards(comm, flat, bounds, plan)
        _gather_shards(comm, flat, bounds)


def _rounds_once(dtype: torch.dtype, plan: Reduction) -> bool:
    # torch adds two half types in fp32 and rounds once, as we would. Not a mean: 60000 + 60000 is past fp16, half of it is not.
    return dtype in _HALVES and not plan.divides


def _exchange_whole(comm: Communicator, flat: torch.Tensor, plan: Reduction) -> None:
    # Two ranks: a + b is b + a to the bit, so both compute the whole.
    peer, tag = 1 - comm.rank, comm.own_tag(_TAG)
    other = comm.scratch(flat.numel(), flat.dtype)
    comm.mpi.Sendrecv(buffer.as_bytes(flat), peer, tag, buffer.as_bytes(other), peer, tag)
    if _rounds_once(flat.dtype, plan):
        _COMBINE[plan.combine](flat, other)
    else:
        wide = comm.scratch(flat.numel(), torch.float32).copy_(flat)
        flat.copy_(wide.add_(other).div_(comm.size))


def _reduce_shards(
    comm: Communicator, flat: torch.Tensor, bounds: list[int], plan: Reduction, mine: torch.Tensor | None = None
) -> None:
    """Reduce this rank's shard of ``flat`` over all ranks, in rank order, into ``mine`` (its own place by default).

    Divides narrow types too, because that must come before they are rounded.
    """
    rank, size = comm.rank, comm.size
    if mine is None:
        mine = flat[bounds[rank] : bounds[rank + 1]]
    itemsize, tag = flat.element_size(), comm.own_tag(_TAG)
    chunk = max(CHUNK_BYTES // itemsize, 1)
    longest = max(bounds[i + 1] - bounds[i] for i in range(size))
    slots = comm.scratch(min(chunk, longest) * size, flat.dtype).view(size, -1)
    peers = [(rank + distance) % size for distance in range(1, size)]
    base, slots_at, slot_bytes = flat.data_ptr(), slots.data_ptr(), slots.stride(0) * itemsize
    for start in range(0, longest, chunk):
        requests = []
        length = max(min(chunk, mine.numel() - start), 0)
        for peer in reversed(peers):
            space = buffer.memory(slots_at + peer * slot_bytes, length * itemsize)
            requests.append(comm.mpi.Irecv((space, length * itemsize, MPI.BYTE), peer, tag))
        for peer in peers:
            count = max(min(chunk, bounds[peer + 1] - bounds[peer] - start), 0)
            address = base + (bounds[peer] + start) * itemsize
            requests.append(comm.mpi.Isend((buffer.memory(address, count * itemsize), count * itemsize, MPI.BYTE), peer, tag))
        wait_all(requests)
        if length:
            _combine_in_rank_order(comm, mine[start : start + length], slots[:, :length], plan)


def _combine_in_rank_order(comm: Communicator, mine: torch.Tensor, slots: torch.Tensor, plan: Reduction) -> None:
    # ((r0 + r1) + r2) + … with this rank's own contribution at its place, whoever computes it.
    combine = _COMBINE[plan.combine]
    if plan.wide is not None and not (comm.size == 2 and _rounds_once(mine.dtype, plan)):
        total = comm.scratch(mine.numel(), plan.wide, slot=2)
        term = comm.scratch(mine.numel(), plan.wide, slot=3)
        for place in range(comm.size):
            source = mine if place == comm.rank else slots[place]
            if place == 0:
                total.copy_(source)
            else:
                combine(total, term.copy_(source))
        _divide(total, plan, comm.size)
        mine.copy_(total)
        return
    before = slots[0]
    for place in range(1, comm.rank):
        combine(before, slots[place])
    if comm.rank > 0:
        combine(mine, before)  # commutative: the same bits as before + mine
    for place in range(comm.rank + 1, comm.size):
        combine(mine, slots[place])


def _gather_shards(comm: Communicator, flat: torch.Tensor, bounds: list[int]) -> None:
    shards = [flat[bounds[place] : bounds[place + 1]] for place in range(comm.size)]
    movement.exchange(comm, [shards[comm.rank]] * comm.size, shards)


def _mpi_types(dtype: torch.dtype, plan: Reduction) -> tuple[Any, Any]:
    if dtype is torch.bool:
        return buffer.datatypes()[dtype], _bool_operations()[plan.combine]
    return buffer.datatypes()[dtype], mpi_operations()[plan.combine]


def _piece_numel(plan: Reduction) -> int | None:
    # Narrow types pass through a buffer of bounded size.
    return None if plan.wide is None and plan.factor is None else 1 << 20


def _scale(tensor: torch.Tensor, plan: Reduction) -> None:
    if plan.factor is not None:
        tensor.mul_(plan.factor)


def _divide(tensor: torch.Tensor, plan: Reduction, size: int) -> None:
    if plan.divides:
        if tensor.dtype.is_complex:
            torch.view_as_real(tensor).div_(size)  # torch's complex division rounds more than once
        elif tensor.dtype.is_floating_point:
            tensor.div_(size)
        else:
            # As NCCL averages integers; NumPy has the unsigned types that torch lacks.
            values = tensor.numpy()
            values -= np.fmod(values, size)
            values //= size
