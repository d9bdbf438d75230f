"""Collectives on CUDA tensors: on device memory where MPI can, else staged through the host.

The choice depends only on what all ranks of a group know (``capability.agreed_operations``,
the tuning table, sizes), because all ranks must enter the same MPI calls. Operations without a
device form are staged as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm.algorithms import (
    device_all_reduce,
    movement,
    rank_order,
    reduce_op,
    reductions,
    ring,
    staging,
    tuning,
)
from mpidist.comm.algorithms.device_all_reduce import able_operations
from mpidist.comm.algorithms.host_copies import on_host
from mpidist.comm.algorithms.reduce_op import ReduceOp
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.overlap import separated
from mpidist.comm.memory.stream import Device, Event
from mpidist.comm.mpi.communicator import Communicator
from mpidist.kernels.pack import pack, unpack

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
Execute = Callable[..., None]
# The device form of an executor; returns False, with all tensors unchanged, where MPI cannot do it.
DeviceForm = Callable[..., bool]
# ``exchange`` receives a message of an unexpected length in host memory.
_EXCHANGE = ("point_to_point", "point_to_point_with_host")


def placed(
    execute: Execute,
    device: Device,
    inputs: Tensors,
    outputs: Tensors,
    args: tuple[Any, ...],
    events: list[Event],
    size: int,
    async_op: bool,
) -> Execute:
    """Return an executor with the effect of ``execute`` on a device's tensors.

    Called by the thread that issues the operation.

    Args:
        execute: An executor of host tensors.
        device: The device of all tensors.
        inputs: The tensors that are read.
        outputs: The tensors that are written.
        args: Further arguments of ``execute``.
        events: Receives the events after which the results may be used.
        size: W.
        async_op: The results may be used on another stream than the current one.
    """
    if size == 1 and _is_identity(execute, outputs, args):
        if not async_op:
            return _do_nothing
        return partial(_record_ready, device, device.record_current_stream(), events)
    fence = StreamFence(device, (*inputs, *outputs))
    device_form = _DEVICE_FORMS.get(execute)
    staged = on_host(execute, fence)

    def run(comm: Communicator, inputs: Tensors, outputs: Tensors, *args: object) -> None:
        # The same MPI calls on all ranks, because each rank chooses for itself whether its call is
        # synchronous, and so which of its threads executes it.
        comm = comm.blocking()
        if not fence.is_issuing_thread():
            device.leave_default_stream()
        with device.as_current():
            fence.wait_ready()
            if device_form is None or not device_form(comm, fence, inputs, outputs, *args):
                staged(comm, inputs, outputs, *args)
            events.extend(fence.record())

    return run


def _is_identity(execute: Execute, outputs: Tensors, args: tuple[Any, ...]) -> bool:
    """Return whether an operation of a single rank leaves its tensors unchanged."""
    if execute in (reductions.all_reduce, reductions.all_reduce_flat, reductions.reduce):
        return all(reduce_op.reduction(tensor.dtype, args[0]).factor is None for tensor in outputs)
    return execute is movement.broadcast


def _do_nothing(comm: Communicator, inputs: Tensors, outputs: Tensors, *args: object) -> None:
    return None


def _record_ready(
    device: Device,
    ready: Event,
    events: list[Event],
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    *args: object,
) -> None:
    # A wait for this call covers the calls before it as well: their copies may be in progress on
    # this thread's streams.
    with device.as_current():
        events.extend((ready, device.down.record(), device.up.record()))


# --- reductions ---


def _all_reduce(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, operation: ReduceOp
) -> bool:
    for tensor in outputs:
        flat = _dense(fence, tensor, filled=True)
        device_all_reduce.choose(comm, flat, operation)(comm, fence, flat, operation)
        _write_back(fence, tensor, flat)
    return True


def _all_reduce_flat(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, operation: ReduceOp
) -> bool:
    if len(outputs) == 1:
        return _all_reduce(comm, fence, inputs, outputs, operation)
    parts, flat = _pack(fence, outputs, filled=True)
    device_all_reduce.choose(comm, flat, operation)(comm, fence, flat, operation)
    _unpack(fence, flat, parts, outputs)
    return True


def _reduce_scatter_tensor(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, operation: ReduceOp
) -> bool:
    applies = all(
        ring.applies(target.dtype, reduce_op.reduction(target.dtype, operation))
        for target in outputs
    )
    if "point_to_point" not in able_operations(comm, outputs[0].device) or not applies:
        return False
    targets = [_dense(fence, target, filled=False) for target in outputs]
    sources = separated(
        [_dense(fence, source, filled=True) for source in inputs],
        targets,
        copy=partial(_copy, fence),
    )
    for source, flat, target in zip(sources, targets, outputs, strict=True):
        plan = reduce_op.reduction(flat.dtype, operation)
        if rank_order.applies(comm, flat.dtype, plan):
            shards = list(source.view(comm.size, -1))
            rank_order.reduce_shards_on_device(comm, fence, shards, flat, plan)
        else:
            chunk_bytes = tuning.agreed_table(comm, flat.device).chunk_bytes(source.nbytes)
            ring.reduce_scatter(comm, fence, source, flat, operation, chunk_bytes)
        _write_back(fence, target, flat)
    return True


# --- movement: the executors work on addresses, of host or device memory ---


def _broadcast(
    comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, root: int
) -> bool:
    tensors, is_root = inputs or outputs, comm.rank == root
    if len(tensors) == 1:
        _broadcast_one(comm, fence, tensors[0], root)
        return True
    parts, flat = _pack(fence, tensors, filled=is_root)
    _broadcast_one(comm, fence, flat, root)
    if not is_root:
        _unpack(fence, flat, parts, tensors)
    return True


def _broadcast_one(comm: Communicator, fence: StreamFence, tensor: Tensor, root: int) -> None:
    is_root = comm.rank == root
    flat = _dense(fence, tensor, filled=is_root)
    if "Bcast" in able_operations(comm, tensor.device):
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


def _on_device(needed: tuple[str, ...], execute: Execute) -> DeviceForm:
    """Return the device form of an executor that moves tensors by these MPI operations."""

    def run(
        comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors, *args: Any
    ) -> bool:
        if not able_operations(comm, (*inputs, *outputs)[0].device).issuperset(needed):
            return False
        sources: Tensors = [_dense(fence, tensor, filled=True) for tensor in inputs]
        targets = [_dense(fence, tensor, filled=False) for tensor in outputs]
        places = partial(movement.in_place, execute, comm.rank, sources, targets)
        sources = separated(sources, targets, places, partial(_copy, fence))
        fence.synchronize()
        # A rank's own part is copied on the device.
        fence.device.down.run(partial(execute, comm, sources, targets, *args))
        for tensor, target in zip(outputs, targets, strict=True):
            _write_back(fence, tensor, target)
        return True

    return run


def _all_gather(comm: Communicator, fence: StreamFence, inputs: Tensors, outputs: Tensors) -> bool:
    # Short tensors are gathered through one flat host buffer.
    if max(tensor.nbytes for tensor in outputs) <= movement.FLAT_BYTES:
        return False
    return _on_device(_EXCHANGE, movement.all_gather)(comm, fence, inputs, outputs)


_DEVICE_FORMS: dict[Execute, DeviceForm] = {
    reductions.all_reduce: _all_reduce,
    reductions.all_reduce_flat: _all_reduce_flat,
    reductions.reduce_scatter_tensor: _reduce_scatter_tensor,
    movement.broadcast: _broadcast,
    movement.all_gather: _all_gather,
    movement.all_gather_into: _on_device(("Allgather", *_EXCHANGE), movement.all_gather_into),
    movement.all_to_all: _on_device(_EXCHANGE, movement.all_to_all),
    movement.all_to_all_single: _on_device(("Alltoallv",), movement.all_to_all_single),
}


# --- dense copies of strided tensors ---


def _dense(fence: StreamFence, tensor: Tensor, filled: bool) -> Tensor:
    """Return a tensor's elements as a flat device tensor; its own memory if it is contiguous."""
    plain = tensor.detach()
    if buffer.is_plain(plain):
        return plain.view(-1)
    dense = fence.device.empty(plain.numel(), plain.dtype)
    if filled:
        fence.device.down.do(lambda: dense.view(plain.shape).copy_(plain))
    return dense


def _copy(fence: StreamFence, dense: Tensor) -> Tensor:
    copy = fence.device.empty(dense.numel(), dense.dtype)
    fence.device.down.do(lambda: copy.copy_(dense))
    return copy


def _pack(fence: StreamFence, tensors: Tensors, filled: bool) -> tuple[list[Tensor], Tensor]:
    """Return the dense form of each tensor, and one flat tensor for all, filled by one launch."""
    parts = [_dense(fence, tensor, filled) for tensor in tensors]
    flat = fence.device.empty(sum(part.numel() for part in parts), parts[0].dtype)
    if filled:
        fence.device.down.do(partial(pack, parts, flat))
    return parts, flat


def _unpack(fence: StreamFence, flat: Tensor, parts: list[Tensor], tensors: Tensors) -> None:
    """Copy the flat tensor of ``_pack`` back into the tensors."""
    # Staged chunks are copied to the device on ``up``.
    fence.device.down.wait(fence.device.up.record())
    fence.device.down.do(partial(unpack, flat, parts))
    for tensor, part in zip(tensors, parts, strict=True):
        _write_back(fence, tensor, part)


def _write_back(fence: StreamFence, tensor: Tensor, dense: Tensor) -> None:
    if dense.data_ptr() != tensor.data_ptr():
        fence.device.down.wait(fence.device.up.record())
        fence.device.down.do(lambda: buffer.overwrite(tensor, dense.view(tensor.shape)))
