"""All-reduce of device memory: the choice among MPI's own, the ring and staging through the host.

The choice depends only on what all ranks of a group know: the operations that this MPI can do
on device memory, the tuning table, dtype and size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mpidist.comm.algorithms import (
    minmax,
    mpi_types,
    rank_order,
    reduce_op,
    ring,
    staging,
    tuning,
)
from mpidist.comm.algorithms.reduce_op import ReduceOp, Reduction
from mpidist.comm.discovery import capability
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI

# Called with (comm, fence, flat, operation); reduces in place.
AllReduce = Callable[[Communicator, StreamFence, torch.Tensor, ReduceOp], None]

_CHOICES = "device all-reduces"  # in Communicator.kept
_MAX_CHOICES = 256
# A single rank sends nothing, so algorithms built on messages run on the device alone.
_SINGLE_RANK = frozenset({"point_to_point", "point_to_point_with_host"})


def choose(comm: Communicator, flat: torch.Tensor, operation: ReduceOp) -> AllReduce:
    """Return ``algorithm`` for a tensor; kept for its kind while the group's tables are unchanged.

    Collective: over ``comm``, the first time for a device.
    """
    kind, device = (flat.dtype, flat.nbytes, operation, flat.device, type(comm.mpi)), flat.device
    choices: dict[object, tuple[object, object, AllReduce]] = comm.kept.setdefault(_CHOICES, {})
    table, able, chosen = choices.get(kind, (None, None, None))
    if (
        chosen is None
        or table is not comm.tuning_tables.get(device.type)
        or able is not comm.device_operations.get(device.type)
    ):
        chosen = algorithm(comm, flat.dtype, flat.nbytes, operation, device)
        if len(choices) >= _MAX_CHOICES:
            choices.clear()
        choices[kind] = (
            comm.tuning_tables.get(device.type),
            comm.device_operations.get(device.type),
            chosen,
        )
    return chosen


def algorithm(
    comm: Communicator,
    dtype: torch.dtype,
    nbytes: int,
    operation: ReduceOp,
    device: torch.device,
    name: str | None = None,
) -> AllReduce:
    """Return the all-reduce that the tuning table ranks first for this size and that is able.

    Collective: over ``comm``, the first time for a device.

    Args:
        comm: The group's communicator.
        dtype: Of the tensor.
        nbytes: Size of the tensor.
        operation: The reduction.
        device: Where the tensor is.
        name: The algorithm to return if it is able; else the table chooses.
    """
    if rank_order.applies(comm, dtype, reduce_op.reduction(dtype, operation)):
        is_able = tuning.RING in able_algorithms(comm, dtype, operation, device)
        return rank_order.all_reduce_on_device if is_able else staging.all_reduce
    able, table = able_algorithms(comm, dtype, operation, device), tuning.agreed_table(comm, device)
    if name is None or name not in able:
        name = table.choose(nbytes, able)
    chunk_bytes = table.chunk_bytes(nbytes)
    if name == tuning.RING and chunk_bytes is not None:
        return partial(ring.all_reduce, chunk_bytes=chunk_bytes)
    return ALGORITHMS[name]


def able_algorithms(
    comm: Communicator, dtype: torch.dtype, operation: ReduceOp, device: torch.device
) -> list[str]:
    """Return the names of the all-reduces that can reduce such tensors with this MPI.

    Collective: over ``comm``, the first time for a device.
    """
    able, plan = able_operations(comm, device), reduce_op.reduction(dtype, operation)
    can = {
        tuning.LIBRARY: "Allreduce" in able and is_reduced_by_mpi(dtype, plan),
        tuning.RING: "point_to_point" in able and ring.applies(dtype, plan),
        tuning.STAGED: True,
    }
    return [name for name, is_able in can.items() if is_able]


def able_operations(comm: Communicator, device: torch.device) -> frozenset[str]:
    """Return the operations that MPI can do on a device's memory.

    Collective: over ``comm``, the first time for a device.
    """
    return _SINGLE_RANK if comm.size == 1 else capability.agreed_operations(comm, device)


def is_reduced_by_mpi(dtype: torch.dtype, plan: Reduction) -> bool:
    """Return whether MPI's own reduction of device memory gives this library's results."""
    # MPI libraries differ in booleans and in NaN; integers are averaged on the host.
    if (
        plan.wide is not None
        or dtype not in mpi_types.datatypes()
        or dtype is torch.bool
        or minmax.applies(dtype, plan)
        or mpi_types.is_callback(dtype, plan)
    ):
        return False
    return not plan.divides or dtype.is_floating_point or dtype.is_complex


def _by_library(
    comm: Communicator, fence: StreamFence, flat: torch.Tensor, operation: ReduceOp
) -> None:
    """All-reduce by blocking MPI calls; Open MPI's non-blocking one crashes on device memory."""
    plan = reduce_op.reduction(flat.dtype, operation)
    fence.device.down.do(partial(reduce_op.scale, flat, plan))
    fence.synchronize()
    if comm.size > 1:
        datatype, op = mpi_types.datatype_and_op(flat.dtype, plan)
        for start, count in buffer.pieces(flat.numel()):
            comm.mpi.Allreduce(MPI.IN_PLACE, buffer.elements(flat, start, count, datatype), op)
    fence.device.down.do(partial(reduce_op.divide, flat, plan, comm.size))


ALGORITHMS: dict[str, AllReduce] = {
    tuning.LIBRARY: _by_library,
    tuning.RING: ring.all_reduce,
    tuning.STAGED: staging.all_reduce,
}
