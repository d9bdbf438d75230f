"""Collectives on CUDA tensors: by device pointer where this MPI can, around our own ring, or staged through pinned memory.

Which way is decided by what all ranks of a group know alike (``capability.agreed_operations``, the
tuning table, sizes), because all must enter the same calls of MPI. Operations without a way of
their own are staged as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm.algorithms import (
    minmax,
    movement,
    mpi_ops,
    reduce_op,
    reductions,
    ring,
    staging,
    tuning,
)
from mpidist.comm.algorithms.host_copies import on_host
from mpidist.comm.algorithms.reduce_op import Operation, Reduction
from mpidist.comm.discovery import capability
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.overlap import separated
from mpidist.comm.memory.stream import Device, Event
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.kernels.pack import pack, unpack

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
Execute = Callable[..., None]
# does what an executor does, or says that it cannot and leaves everything as it was
Way = Callable[..., bool]

_CHOSEN = "device all-reduces"  # the name of what a communicator keeps
_REMEMBERED = 256  # kinds of tensors


def placed(
    execute: Execute,
    device: Device,
    inputs: Tensors,
    outputs: Tensors,
    args: tuple[Any, ...],
    events: list[Any],
    size: int,
    async_op: bool,
) -> Execute:
    """Return an executor that does what ``execute`` does, for tensors on a device.

    Called by the thread that issues the operation.

    Args:
        args: What ``execute`` gets besides the tensors.
        events: Receives the events behind which the results are there.
        size: W.
        async_op: Whoever waits may do so on another stream than the current one.
    """
    if size == 1 and _changes_nothing(execute, outputs, args):
        return (
            partial(_nothing_behind, device, device.record_current_stream(), events)
            if async_op
            else _nothing
        )
    fence = StreamFence(device, (*inputs, *outputs))
    way = _WAYS.get(execute)
    staged = on_host(execute, fence)

    def run(comm: Communicator, inputs: Tensors, outputs: Tensors, *args: Any) -> None:
        # All ranks alike: whether a call is synchronous or not, and so which thread executes it, is
        # each rank's own affair.
        comm = comm.blocking()
        if not fence.is_issuing_thread():
            device.leave_default_stream()
        with device.as_current():
            fence.wait_ready()
            if way is None or not way(comm, fence, inputs, outputs, *args):
                staged(comm, inputs, outputs, *args)
            events.extend(fence.record())

    return run


def _changes_nothing(execute: Execute, outputs: Tensors, args: tuple[Any, ...]) -> bool:
    """Say whether an operation of one rank leaves its tensors as they are."""
    if execute in (reductions.all_reduce, reductions.all_reduce_flat, reductions.reduce):
        return all(reduce_op.reduction(tensor.dtype, args[0]).factor is None for tensor in outputs)
    return execute is movement.broadcast


def _nothing(comm: Communicator, inputs: Tensors, outputs: Tensors, *args: Any) -> None:
    return None


def _nothing_behind(
    device: Device,
    ready: Event,
    events: list[Any],
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    *args: Any,
) -> None:
    # Whoever waits for this call alone is behind those before it, too: their copies may be under
    # way on this thread's streams.
    with device.as_current():
        events.extend((ready, device.down.record(), device.up.record()))


# --- reductions ---


def _all_reduce(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, operation: Operation
) -> bool:
    for tensor in outputs:
        flat = _dense(fence, tensor, filled=True)
        _chosen(comm, flat, operation)(comm, fence, flat, operation)
        _write_back(fence, tensor, flat)
    return True


def _all_reduce_flat(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, operation: Operation
) -> bool:
    if len(outputs) == 1:
        return _all_reduce(comm, fence, inputs, outputs, operation)
    parts, flat = _together(fence, outputs, filled=True)
    _chosen(comm, flat, operation)(comm, fence, flat, operation)
    _apart(fence, flat, parts, outputs)
    return True


def _reduce_scatter_tensor(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, operation: Operation
) -> bool:
    applies = all(
        ring.applies(target.dtype, reduce_op.reduction(target.dtype, operation))
        for target in outputs
    )
    if "point_to_point" not in _able(comm, outputs[0]) or not applies:
        return False
    targets = [_dense(fence, target, filled=False) for target in outputs]
    sources = separated(
        [_dense(fence, source, filled=True) for source in inputs],
        targets,
        copy=partial(_copied, fence),
    )
    for source, flat, target in zip(sources, targets, outputs, strict=True):
        chunk_bytes = tuning.agreed_table(comm, flat.device).chunk_bytes(source.nbytes)
        ring.reduce_scatter(comm, fence, source, flat, operation, chunk_bytes)
        _write_back(fence, target, flat)
    return True


def _chosen(comm: Communicator, flat: Tensor, operation: Operation) -> Callable[..., None]:
    """Return the ``algorithm`` for a tensor: the last one for its kind, as long as table and operations are the same objects."""
    kind, device = (flat.dtype, flat.nbytes, operation, flat.device, type(comm.mpi)), flat.device
    held: dict[Any, tuple[Any, Any, Callable[..., None]]] = comm.kept.setdefault(_CHOSEN, {})
    table, able, found = held.get(kind, (None, None, None))
    if (
        found is None
        or table is not comm.tuning_tables.get(device.type)
        or able is not comm.device_operations.get(device.type)
    ):
        found = algorithm(comm, flat.dtype, flat.nbytes, operation, device)
        if len(held) >= _REMEMBERED:
            held.clear()
        held[kind] = (
            comm.tuning_tables.get(device.type),
            comm.device_operations.get(device.type),
            found,
        )
    return found


def algorithm(
    comm: Communicator,
    dtype: torch.dtype,
    nbytes: int,
    operation: Operation,
    device: torch.device,
    name: str | None = None,
) -> Callable[..., None]:
    """Return the all-reduce that the tuning table names for this size, among those that can do it; a ring with its chunks.

    Collective: over ``comm``, the first time for a device.

    Args:
        name: Take this one, if it can; else the table's choice.
    """
    able, table = able_algorithms(comm, dtype, operation, device), tuning.agreed_table(comm, device)
    if name is None or name not in able:
        name = table.choose(nbytes, able)
    chunk_bytes = table.chunk_bytes(nbytes)
    if name == tuning.RING and chunk_bytes is not None:
        return partial(ring.all_reduce, chunk_bytes=chunk_bytes)
    return ALGORITHMS[name]


def able_algorithms(
    comm: Communicator, dtype: torch.dtype, operation: Operation, device: torch.device
) -> list[str]:
    """Return the names of the all-reduces that can reduce such tensors on this MPI.

    Collective: over ``comm``, the first time for a device.
    """
    able, plan = _able(comm, device), reduce_op.reduction(dtype, operation)
    can = {
        tuning.LIBRARY: "Allreduce" in able and _is_mpis(dtype, plan),
        tuning.RING: "point_to_point" in able and ring.applies(dtype, plan),
        tuning.STAGED: True,
    }
    return [name for name, is_able in can.items() if is_able]


def _is_mpis(dtype: torch.dtype, plan: Reduction) -> bool:
    # Booleans and NaN are where MPI libraries differ; integers are averaged on the host.
    if (
        plan.wide is not None
        or dtype not in buffer.datatypes()
        or dtype is torch.bool
        or minmax.applies(dtype, plan)
    ):
        return False
    if mpi_ops.calls_back(dtype, plan):
        return False
    return not plan.divides or dtype.is_floating_point or dtype.is_complex


def _by_library(comm: Communicator, fence: StreamFence, flat: Tensor, operation: Operation) -> None:
    """All-reduce by one blocking call of MPI: under Open MPI its non-blocking twin crashes on device memory."""
    plan = reduce_op.reduction(flat.dtype, operation)
    fence.device.down.do(partial(reduce_op.scale, flat, plan))
    fence.synchronize()
    if comm.size > 1:
        datatype, op = mpi_ops.types_of(flat.dtype, plan)
        for start, count in buffer.pieces(flat.numel()):
            comm.mpi.Allreduce(MPI.IN_PLACE, buffer.elements(flat, start, count, datatype), op)
    fence.device.down.do(partial(reduce_op.divide, flat, plan, comm.size))


# --- movement: the executors work on addresses, whosever memory it is ---


def _broadcast(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, root: int
) -> bool:
    tensors, is_root = inputs or outputs, comm.rank == root
    if len(tensors) == 1:
        _broadcast_one(comm, fence, tensors[0], root)
        return True
    parts, flat = _together(fence, tensors, filled=is_root)
    _broadcast_one(comm, fence, flat, root)
    if not is_root:
        _apart(fence, flat, parts, tensors)
    return True


def _broadcast_one(comm: Communicator, fence: StreamFence, tensor: Tensor, root: int) -> None:
    is_root = comm.rank == root
    flat = _dense(fence, tensor, filled=is_root)
    if "Bcast" in _able(comm, tensor):
        fence.synchronize()
        movement.broadcast(comm, (flat,) if is_root else (), () if is_root else (flat,), root)
    else:
        staging.through_host(
            fence, flat, partial(_broadcast_chunk, comm, root), reads=is_root, writes=not is_root
        )
    if not is_root:
        _write_back(fence, tensor, flat)


def _broadcast_chunk(comm: Communicator, root: int, chunk: Tensor) -> None:
    movement.broadcast(comm, (chunk,), (), root)


def _moved(needed: tuple[str, ...], execute: Execute) -> Way:
    """Return the way of an executor that moves contiguous tensors by these operations of MPI."""

    def way(
        comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, *args: Any
    ) -> bool:
        if not _able(comm, (*inputs, *outputs)[0]).issuperset(needed):
            return False
        sources = [_dense(fence, tensor, filled=True) for tensor in inputs]
        targets = [_dense(fence, tensor, filled=False) for tensor in outputs]
        places = movement.in_place(execute, comm.rank, sources, targets)
        sources = separated(sources, targets, places, partial(_copied, fence))
        fence.synchronize()
        # a rank's own part is copied on the device
        fence.device.down.run(partial(execute, comm, sources, targets, *args))
        for tensor, target in zip(outputs, targets, strict=True):
            _write_back(fence, tensor, target)
        return True

    return way


def _all_gather(comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors) -> bool:
    # Short ones go through one flat host buffer.
    if max(tensor.nbytes for tensor in outputs) <= movement.FLAT_BYTES:
        return False
    return _moved(("point_to_point",), movement.all_gather)(comm, fence, inputs, outputs)


# a rank by itself sends nothing, so what is built on messages is all done on the device
_ALONE = frozenset({"point_to_point"})

ALGORITHMS: dict[str, Callable[..., None]] = {
    tuning.LIBRARY: _by_library,
    tuning.RING: ring.all_reduce,
    tuning.STAGED: staging.all_reduce,
}

_WAYS: dict[Execute, Way] = {
    reductions.all_reduce: _all_reduce,
    reductions.all_reduce_flat: _all_reduce_flat,
    reductions.reduce_scatter_tensor: _reduce_scatter_tensor,
    movement.broadcast: _broadcast,
    movement.all_gather: _all_gather,
    movement.all_gather_into: _moved(("Allgather", "point_to_point"), movement.all_gather_into),
    movement.all_to_all: _moved(("point_to_point",), movement.all_to_all),
    movement.all_to_all_single: _moved(("Alltoallv", "point_to_point"), movement.all_to_all_single),
}


def _able(comm: Communicator, where: Tensor | torch.device) -> frozenset[str]:
    if comm.size == 1:
        return _ALONE
    return capability.agreed_operations(comm, where.device if isinstance(where, Tensor) else where)


# --- tensors whose elements do not lie one behind the other ---


def _dense(fence: StreamFence, tensor: Tensor, filled: bool) -> Tensor:
    """Return a tensor's elements as a flat one on the device; its own memory if they lie there in order."""
    plain = tensor.detach()
    if buffer.is_plain(plain):
        return plain.view(-1)
    dense = fence.device.empty(plain.numel(), plain.dtype)
    if filled:
        fence.device.down.do(lambda: dense.view(plain.shape).copy_(plain))
    return dense


def _copied(fence: StreamFence, dense: Tensor) -> Tensor:
    copy = fence.device.empty(dense.numel(), dense.dtype)
    fence.device.down.do(lambda: copy.copy_(dense))
    return copy


def _together(fence: StreamFence, tensors: Tensors, filled: bool) -> tuple[list[Tensor], Tensor]:
    """Return each tensor as ``_dense`` does, and one for all of them; one launch fills that, whatever their number."""
    parts = [_dense(fence, tensor, filled) for tensor in tensors]
    flat = fence.device.empty(sum(part.numel() for part in parts), parts[0].dtype)
    if filled:
        fence.device.down.do(partial(pack, parts, flat))
    return parts, flat


def _apart(fence: StreamFence, flat: Tensor, parts: list[Tensor], tensors: Tensors) -> None:
    """Bring what is in the one for all back into the tensors."""
    fence.device.down.wait(fence.device.up.record())  # staged chunks go up there
    fence.device.down.do(partial(unpack, flat, parts))
    for tensor, part in zip(tensors, parts, strict=True):
        _write_back(fence, tensor, part)


def _write_back(fence: StreamFence, tensor: Tensor, dense: Tensor) -> None:
    if dense.data_ptr() != tensor.data_ptr():
        fence.device.down.wait(fence.device.up.record())
        fence.device.down.do(lambda: buffer.overwrite(tensor, dense.view(tensor.shape)))
