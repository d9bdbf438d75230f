"""Events of a group's operations in ``torch.profiler``.

An operation is an event ``mpidist:<operation>`` in the thread that executes it, with the shapes of
its tensors (``record_shapes=True``) and, in the trace, the fields that torch writes for NCCL's
collectives. torch's profiler records the thread that started it alone, so an asynchronous
operation, which the group's thread executes, is an event where it is queued
(``mpidist:<operation>``, its duration that of the queueing) and where it is waited for
(``mpidist:<operation>:wait``). With ``_ExperimentalConfig(profile_all_threads=True)`` the group's
thread is recorded as well, and the event is there instead.

No event stays open from one thread to another, as Gloo's did: torch frees the memory of events when
the profiler ends, and writes the end of one that is still open into it.

Callers look at ``torch.autograd.profiler._is_profiler_enabled`` by themselves, which is right in
any thread and takes about 20 ns; that is all an operation costs while no profiler is on.

Source: names of the fields in torch/csrc/profiler/util.h. torch's own event of them,
``record_param_comms``, cannot be made from Python: the profiler reads a C++ object beside it, and
crashes when there is none (2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import torch

from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.op_status import Journal
from mpidist.comm.operation import Operation, Tensors

__all__ = ["calling", "event", "executing", "messaging", "queueing", "waiting"]

F = TypeVar("F", bound=Callable[..., Any])

_PREFIX = "mpidist:"
_SHOWN_RANKS = 30  # of a group, as torch does
_NAMES = {"isend": "send", "irecv": "recv"}  # one name for a message, as Gloo and NCCL have it

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


class Group(Protocol):
    """The part of a process group that an event describes."""

    name: str
    rank: int
    size: int
    world_ranks: tuple[int, ...]
    journal: Journal


def event(
    group: Group, operation: str, inputs: Tensors = (), outputs: Tensors = (), **fields: int | str
) -> AbstractContextManager[Any]:
    """Return a context that is one operation's event, in the thread that enters and leaves it.

    Args:
        group: The group, for its name and ranks.
        inputs: What this rank gives; their shapes are the event's, or else those of ``outputs``.
        outputs: What it gets.
        fields: More for the trace; underscores stand for spaces.
    """
    tensors = inputs or outputs
    about = dict(_about_group(group.name, group.world_ranks, group.rank))
    about["Collective name"] = _COLLECTIVE_NAMES.get(operation, operation)
    if tensors:
        about["dtype"] = _dtype(tensors[0].dtype)
        about["In msg nelems"] = sum(tensor.numel() for tensor in inputs)
        about["Out msg nelems"] = sum(tensor.numel() for tensor in outputs)
    for name, value in fields.items():
        about[name.replace("_", " ")] = value
    return _Event(_name(operation), list(tensors), about)


def executing(
    execute: Callable[..., Any], group: Group, operation: Operation
) -> Callable[..., Any]:
    """Wrap an operation's ``execute``, so that the call is the operation's event."""

    def run(comm: Communicator, inputs: Tensors, outputs: Tensors, *args: Any) -> Any:
        shown = outputs or operation.results
        sequence = group.journal.sequence
        with event(group, operation.name, inputs, shown, Seq=sequence):
            return execute(comm, inputs, outputs, *args)

    return run


def queueing(submit: F, group: Group, operation: Operation) -> F:
    """Wrap the call that queues an operation, so that it is an event if ``executing`` records none."""
    # True if the profiler records this thread alone; False in a profile of all threads.
    if not torch._C._autograd._profiler_enabled():
        return submit
    outputs = operation.outputs or operation.results
    return _within(
        event(group, operation.name, operation.inputs, outputs, Is_asynchronized_op="True"), submit
    )


def messaging(function: F, group: Group, operation: str, tensor: Any, peer: Any) -> F:
    """Wrap what sends or receives a tensor, or starts to, so that it is an event; arguments that it will refuse have none.

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


def calling(function: F, group: Group, operation: str) -> F:
    """Wrap a call that does not go through the group's queue, so that it is an event of the calling thread."""
    return _within(event(group, operation), function)


def waiting(wait: F, operation: str) -> F:
    """Wrap what waits for an operation's end, so that it is an event of the thread that waits."""
    return _within(_Event(_name(operation) + ":wait", [], {}), wait)


def _within(context: AbstractContextManager[Any], function: F) -> F:
    def call(*args: Any) -> Any:
        with context:
            return function(*args)

    return cast(F, call)


def _name(operation: str) -> str:
    return _PREFIX + _NAMES.get(operation, operation)


_Event: Callable[[str, list[Any], dict[str, Any]], AbstractContextManager[Any]] = (
    torch._C._profiler._RecordFunctionFast
)


@functools.lru_cache(64)
def _about_group(name: str, world_ranks: tuple[int, ...], rank: int) -> dict[str, int | str]:
    shown = ", ".join(map(str, world_ranks))
    if len(world_ranks) > _SHOWN_RANKS:
        shown = ", ".join(map(str, world_ranks[: _SHOWN_RANKS - 1])) + f", ..., {world_ranks[-1]}"
    return {
        # Kineto writes it into JSON as it is.
        "Process Group Name": name.replace("\\", "/").replace('"', "'"),
        "Process Group Ranks": f"[{shown}]",
        "Group size": len(world_ranks),
        "Rank": rank,
    }


def _dtype(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")
