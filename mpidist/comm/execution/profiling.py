"""Events of a group's operations in ``torch.profiler``.

An operation is an event ``mpidist:<operation>`` in the thread that executes it, with the shapes of
its tensors (``record_shapes=True``) and, in the trace, the fields that torch writes for NCCL's
collectives. torch's profiler records only the thread that started it. An asynchronous operation,
which the group's thread executes, is therefore an event where it is queued
(``mpidist:<operation>``, with the duration of the queueing) and where a thread waits for it
(``mpidist:<operation>:wait``). With ``_ExperimentalConfig(profile_all_threads=True)`` the group's
thread is recorded as well, and has the event instead.

Every event ends in the thread in which it began. torch frees the memory of events when the profiler
ends, and would write the end of an open event into freed memory.

Callers read ``torch.autograd.profiler._is_profiler_enabled`` themselves, which is valid in any
thread. The read takes about 20 ns, the only cost of an operation while no profiler is active.

Source: torch/csrc/profiler/util.h has the names of the fields. torch's own event with these fields,
``record_param_comms``, cannot be made from Python: the profiler reads a C++ object with it, and
crashes without that object (2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch

from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.mpi.communicator import Communicator

__all__ = ["calling", "event", "executing", "messaging", "queueing", "waiting"]

F = TypeVar("F", bound=Callable[..., object])

_PREFIX = "mpidist:"
_SHOWN_RANKS = 30  # as torch
_NAMES = {"isend": "send", "irecv": "recv"}  # as Gloo and NCCL

# NCCL's names for what torch's tools call "Collective name", where they are not ours.
_COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "_allgather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_allv",
    "broadcast_coalesced": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
# C++'s names, which torch's tools parse.
_DTYPES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
    torch.bool: "Bool",
    torch.bfloat16: "BFloat16",
}


def event(
    group: GroupState,
    operation: str,
    inputs: Tensors = (),
    outputs: Tensors = (),
    **fields: int | str,
) -> AbstractContextManager[object]:
    """Return a context that records one operation as an event.

    Args:
        group: Its name and ranks are fields of the event.
        inputs: Tensors that this rank sends. Their shapes are the event's, or those of ``outputs``
            if there are none.
        outputs: Tensors that this rank receives.
        fields: Further fields; underscores in their names become spaces.

    The event's name is that of ``dist.record_comm`` if the calling thread is within one.
    """
    return _event(group, operation, requested_name(), inputs, outputs, fields)


def requested_name() -> str:
    """Return the name of this thread's ``dist.record_comm``, "" outside; torch 2.13."""
    return _requested() if _requested is not None else ""


def _event(
    group: GroupState,
    operation: str,
    title: str,
    inputs: Tensors,
    outputs: Tensors,
    fields: Mapping[str, int | str],
) -> AbstractContextManager[object]:
    tensors = inputs or outputs
    about = dict(_about_group(group.name, group.world_ranks, group.rank))
    about["Collective name"] = _COLLECTIVE_NAMES.get(operation, operation)
    if tensors:
        about["dtype"] = _dtype(tensors[0].dtype)
        about["In msg nelems"] = sum(tensor.numel() for tensor in inputs)
        about["Out msg nelems"] = sum(tensor.numel() for tensor in outputs)
    for name, value in fields.items():
        about[name.replace("_", " ")] = value
    return _Event(title or _name(operation), list(tensors), about)


def executing(
    execute: Callable[..., Any], group: GroupState, operation: Operation
) -> Callable[..., Any]:
    """Wrap an operation's ``execute``, so that the call is the operation's event."""

    def run(comm: Communicator, inputs: Tensors, outputs: Tensors, *args: object) -> Any:
        shown = outputs or operation.results
        sequence = group.journal.sequence
        fields = {"Seq": sequence}
        # The group's thread may execute what another thread has issued.
        with _event(group, operation.name, operation.title, inputs, shown, fields):
            return execute(comm, inputs, outputs, *args)

    return run


def queueing(submit: F, group: GroupState, operation: Operation) -> F:
    """Wrap the call that queues an operation, so that it is an event.

    Not in a profile of all threads, in which ``executing`` records the operation.
    """
    # True if the profiler records this thread alone; False in a profile of all threads.
    if not torch._C._autograd._profiler_enabled():
        return submit
    outputs = operation.outputs or operation.results
    return _within(
        event(group, operation.name, operation.inputs, outputs, Is_asynchronized_op="True"), submit
    )


def messaging(function: F, group: GroupState, operation: str, tensor: object, peer: object) -> F:
    """Wrap a call that sends or receives a tensor, so that the call is an event.

    Calls with invalid arguments, which raise, are not recorded.

    Args:
        peer: The other rank in the group; None for any.
    """
    if not isinstance(tensor, torch.Tensor) or not (
        peer is None or (isinstance(peer, int) and 0 <= peer < group.size)
    ):
        return function
    other = "any" if peer is None else group.world_ranks[peer]
    own = group.world_ranks[group.rank]
    source, target = (own, other) if operation.endswith("send") else (other, own)
    return _within(
        event(group, operation, (tensor,), (tensor,), Src_Rank=source, Dst_Rank=target), function
    )


def calling(function: F, group: GroupState, operation: str) -> F:
    """Wrap a call that is not queued, so that the call is an event of the calling thread."""
    return _within(event(group, operation), function)


def waiting(wait: F, operation: str) -> F:
    """Wrap a wait for an operation, so that the wait is an event of the waiting thread."""
    return _within(_Event(_name(operation) + ":wait", [], {}), wait)


_requested: Callable[[], str] | None = getattr(
    getattr(torch._C, "_distributed_c10d", None), "_get_comm_profiling_name", None
)


def _within(context: AbstractContextManager[object], function: F) -> F:
    def call(*args: object) -> object:
        with context:
            return function(*args)

    return cast(F, call)


def _name(operation: str) -> str:
    return _PREFIX + _NAMES.get(operation, operation)


_Event: Callable[
    [str, list[torch.Tensor], dict[str, int | str]], AbstractContextManager[object]
] = torch._C._profiler._RecordFunctionFast


@functools.lru_cache(64)
def _about_group(name: str, world_ranks: tuple[int, ...], rank: int) -> dict[str, int | str]:
    shown = ", ".join(map(str, world_ranks))
    if len(world_ranks) > _SHOWN_RANKS:
        shown = ", ".join(map(str, world_ranks[: _SHOWN_RANKS - 1])) + f", ..., {world_ranks[-1]}"
    return {
        # Kineto writes the name into JSON without escapes.
        "Process Group Name": name.replace("\\", "/").replace('"', "'"),
        "Process Group Ranks": f"[{shown}]",
        "Group size": len(world_ranks),
        "Rank": rank,
    }


def _dtype(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")
