"""All-reduce of low-precision types (fp16, bf16, fp8, complex32) in host memory; sums are fp32.

Two ranks exchange half types, as a whole or by halves, because a + b and b + a have the same bits.
More ranks widen short tensors and let MPI reduce them; longer tensors are sent unwidened, by shards
(``pairwise``). All ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpidist.comm.algorithms import minmax, mpi_types, pairwise, reduce_op
from mpidist.comm.algorithms.reduce_op import COMBINE, Reduction
from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.matched_probe import LengthError, Receives
from mpidist.comm.mpi.scratch import Scratch
from mpidist.comm.mpi.tags import Tag

# Measured crossovers (docs/decisions/0002).
# Two ranks exchange a half type as a whole up to this size.
WHOLE_BYTES = 128 << 10
# More ranks widen a tensor up to this many elements.
WIDEN_NUMEL = 1 << 16
# Up to this many elements, the widened memory is prepared.
PREPARED_NUMEL = 1 << 12


def all_reduce(comm: Communicator, flat: torch.Tensor, plan: Reduction) -> None:
    """Reduce a flat tensor of N elements over all ranks (two or more), in place."""
    assert plan.wide is not None
    if comm.size == 2 and flat.nbytes <= WHOLE_BYTES and flat.dtype in reduce_op.HALVES:
        _exchange_whole(comm, flat, plan)
    elif (
        comm.size == 2
        and flat.nbytes <= pairwise.CHUNK_BYTES * 2
        and reduce_op.rounds_once(flat.dtype, plan)
    ):
        _exchange_halves(comm, flat, plan)
    elif flat.numel() <= WIDEN_NUMEL or plan.combine not in COMBINE:
        wide = comm.scratch(flat.numel(), plan.wide).copy_(flat)
        datatype, op = mpi_types.datatype_and_op(plan.wide, plan)
        comm.mpi.Allreduce(MPI.IN_PLACE, buffer.elements(wide, 0, flat.numel(), datatype), op)
        reduce_op.divide(wide, plan, comm.size)
        flat.copy_(wide)
    else:
        pairwise.all_reduce(comm, flat, plan)


def prepared(
    comm: Communicator, tensor: torch.Tensor, plan: Reduction
) -> Callable[[torch.Tensor], None] | None:
    """Return ``all_reduce`` prepared for this tensor's memory, size and dtype.

    None where Python's share of the time is small, or nothing can be prepared.
    """
    numel = tensor.numel()
    if (
        not numel
        or not reduce_op.rounds_once(tensor.dtype, plan)
        or minmax.applies(tensor.dtype, plan)
    ):
        return None
    if comm.size == 2 and tensor.nbytes <= WHOLE_BYTES:
        peer, tag, combine = 1 - comm.rank, comm.own_tag(Tag.PAIRWISE), COMBINE[plan.combine]
        space, status, nbytes = (
            _space(comm, tensor.dtype, Scratch.PREPARED_RECEIVED),
            MPI.Status(),
            tensor.nbytes,
        )
        mine, theirs, other = buffer.as_bytes(tensor), buffer.as_bytes(space), space[:numel]

        def exchange(tensor: torch.Tensor) -> None:
            comm.mpi.Sendrecv(mine, peer, tag, theirs, peer, tag, status)
            if status.Get_count(MPI.BYTE) != nbytes:
                raise LengthError.of(peer, status.Get_count(MPI.BYTE), nbytes)
            combine(tensor if tensor.dim() == 1 else tensor.view(-1), other)

        return exchange
    if comm.size > 2 and numel <= PREPARED_NUMEL:
        wide = comm.scratch(numel, torch.float32, Scratch.PREPARED_WIDE)
        datatype, op = mpi_types.datatype_and_op(torch.float32, plan)
        message = buffer.elements(wide, 0, numel, datatype)

        def widen(tensor: torch.Tensor) -> None:
            flat = tensor if tensor.dim() == 1 else tensor.view(-1)
            wide.copy_(flat)
            comm.mpi.Allreduce(MPI.IN_PLACE, message, op)
            flat.copy_(wide)

        return widen
    return None


def _exchange_whole(comm: Communicator, flat: torch.Tensor, plan: Reduction) -> None:
    # Two ranks: a + b and b + a have the same bits, so both compute the whole.
    peer, tag = 1 - comm.rank, comm.own_tag(Tag.PAIRWISE)
    space, status = _space(comm, flat.dtype), MPI.Status()
    comm.mpi.Sendrecv(buffer.as_bytes(flat), peer, tag, buffer.as_bytes(space), peer, tag, status)
    if status.Get_count(MPI.BYTE) != flat.nbytes:
        raise LengthError.of(peer, status.Get_count(MPI.BYTE), flat.nbytes)
    other = space[: flat.numel()]
    if reduce_op.rounds_once(flat.dtype, plan):
        COMBINE[plan.combine](flat, other)
    else:
        wide = comm.scratch(flat.numel(), torch.float32).copy_(flat)
        flat.copy_(wide.add_(other).div_(comm.size))


def _exchange_halves(comm: Communicator, flat: torch.Tensor, plan: Reduction) -> None:
    # The shards of two ranks are one chunk each: the bookkeeping of ``pairwise`` would take as long
    # as the transfer.
    peer, tag, middle = 1 - comm.rank, comm.own_tag(Tag.PAIRWISE), flat.numel() // 2
    mine, theirs = (
        (flat[:middle], flat[middle:]) if comm.rank == 0 else (flat[middle:], flat[:middle])
    )
    other = comm.scratch(mine.numel(), flat.dtype)
    own_half, their_half = buffer.as_bytes(mine), buffer.as_bytes(theirs)
    received = Receives(comm)
    _swap(comm, received, their_half, buffer.as_bytes(other), peer, tag)
    COMBINE[plan.combine](mine, other)
    _swap(comm, received, own_half, their_half, peer, tag)
    received.end()


def _swap(
    comm: Communicator,
    received: Receives,
    out: buffer.Buffer,
    into: buffer.Buffer,
    peer: int,
    tag: int,
) -> None:
    request = comm.mpi.Isend(out, peer, tag)
    received.receive(into, peer, tag)
    comm.wait_all([request])


def _space(comm: Communicator, dtype: torch.dtype, use: Scratch = Scratch.WORK) -> torch.Tensor:
    # The space holds the longest message of this tag, so the receive needs no probe.
    return comm.scratch(max(pairwise.CHUNK_BYTES, WHOLE_BYTES) // dtype.itemsize, dtype, use)
