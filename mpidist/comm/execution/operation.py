"""Description of one collective: the function that executes it, and the tensors it works on.

The executors here call a function of the caller (``in_order``) or do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mpidist.comm.execution.progress import at_once
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device, Event
from mpidist.comm.mpi.communicator import Communicator

T = TypeVar("T")

Tensors = Sequence[torch.Tensor]
Facts = Sequence[tuple[str, object]]


@dataclass(slots=True)
class Operation:
    """One collective of a group, described before it is executed or queued.

    Attributes:
        name: The name in messages, reports and profiles.
        execute: Called as ``execute(comm, inputs, outputs, *args)`` on the executing thread. The
            result of an operation that has no outputs is returned.
        inputs: Tensors that are read.
        outputs: Tensors that are written.
        args: Further arguments of ``execute``.
        facts: Names and values that must be equal on all ranks; compared in debug mode.
        results: Value of a Work's future, if neither the outputs nor the inputs.
        device: Device of the operation, if it has no tensors; None for the host.
        events: Filled by ``execute`` on a device: the results are complete behind these events.
        title: Name of its profiler event, if another than the operation's.
    """

    name: str
    execute: Callable[..., Any]
    inputs: Tensors = ()
    outputs: Tensors = ()
    args: tuple[Any, ...] = ()
    facts: Facts = ()
    results: Tensors = ()
    device: Device | None = None
    events: Sequence[Event] = ()
    title: str = ""

    def is_direct(self) -> bool:
        """Return whether MPI can work on the memory of all tensors."""
        outputs = self.outputs
        return buffer.is_direct(*self.inputs) and (
            outputs is self.inputs or buffer.is_direct(*outputs)
        )

    def work_results(self) -> Tensors:
        """Return the value of a Work's future."""
        return self.results or self.outputs or self.inputs


def call(comm: Communicator, inputs: Tensors, outputs: Tensors, function: Callable[[], T]) -> T:
    """Call ``function``; the operations that it issues have ended when their calls return."""
    with at_once():
        return function()


def call_on_device(
    comm: Communicator,
    inputs: Tensors,
    outputs: Tensors,
    function: Callable[[], T],
    fence: StreamFence,
    events: list[Event],
) -> T:
    """Call ``function``, which queues work on a device; add the event behind that work."""
    fence.wait_ready_on_current_stream()
    result = call(comm, inputs, outputs, function)
    events.append(fence.device.record_current_stream())
    return result


def refuse(comm: Communicator, inputs: Tensors, outputs: Tensors) -> None:
    """Do nothing: every rank has refused its arguments with the same words."""
