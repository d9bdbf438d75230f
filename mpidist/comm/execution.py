"""Execution of one collective: checks of the group, agreement (debug mode), host copies, order, journal, typed errors."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm import profiling
from mpidist.comm.algorithms import device_collectives, fingerprint
from mpidist.comm.algorithms.host_copies import on_host
from mpidist.comm.group_failure import ABORT, RAISE, Failing
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Device, device_at, device_of
from mpidist.comm.mpi import autograd_mode, nonblocking
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.op_status import Journal
from mpidist.comm.progress import Progress, at_once, is_at_once
from mpidist.comm.work import Work
from mpidist.errors import MpidistError

_ENV_DEBUG = "MPIDIST_DEBUG"  # "1": every collective first compares what each rank is about to do

Facts = Sequence[tuple[str, Any]]

_groups: weakref.WeakSet[Execution] = weakref.WeakSet()


def _forbid_in_child() -> None:
    # A forked child shares the parent's connections, and its MPI would answer in the parent's name.
    for group in list(_groups):
        group.fail(
            MpidistError(
                f"{group.where('a collective')} was called in a process forked from the rank, "
                "which cannot communicate; "
                "use multiprocessing_context='spawn' or 'forkserver', and keep collectives in the "
                "parent"
            )
        )


os.register_at_fork(after_in_child=_forbid_in_child)


class Execution(Failing):
    """The part of a process group that all its operations share.

    Attributes:
        key: Names the group alone, and alike on all its ranks.
        timeout_s: How long an operation may take before the watchdog reports it; None for no limit.
        journal: What the group is doing.
    """

    # Calls whose refusals the other ranks hear of in debug mode.
    _told_operations: tuple[str, ...] = ()

    def __init__(
        self,
        comm: Communicator,
        name: str,
        key: str,
        world_ranks: Sequence[int],
        timeout_s: float | None,
        debug: bool | None = None,
        on_timeout: str = ABORT,
    ) -> None:
        super().__init__(comm, name, world_ranks, on_timeout)
        self.key = key
        self.timeout_s = timeout_s
        self.journal = Journal(name, key)
        # Between nodes the group's thread lets the computation have the core that it waits on.
        self._comm_of_thread = comm if comm.is_single_node else comm.sleeping()
        if on_timeout == RAISE:
            check = _check_of(weakref.ref(self))
            self._comm_of_thread = comm.sleeping()
            self._comm_of_thread.mpi = nonblocking.abandonable(
                comm.plain, check, sleeps=not comm.is_single_node
            )
            comm.mpi = nonblocking.abandonable(comm.plain, check, sleeps=False)
        self._progress = Progress(name)
        self._door = self._progress.door
        self._debug = os.environ.get(_ENV_DEBUG) == "1" if debug is None else debug
        self._entered = False
        _groups.add(self)
        if self._debug:
            for operation in self._told_operations:
                setattr(self, operation, self._telling(operation, getattr(self, operation)))

    @property
    def is_single_node(self) -> bool:
        """Say whether all ranks of the group share one node's memory."""
        return self._comm.is_single_node

    @property
    def is_closed(self) -> bool:
        """Say whether ``close`` was called."""
        return self._closed

    def in_order(
        self,
        function: Callable[[], None],
        async_op: bool = True,
        device: torch.device | None = None,
        *,
        operation: str = "in_order",
        facts: Facts = (),
        results: Sequence[torch.Tensor] = (),
    ) -> Work | None:
        """Execute ``function()`` as one operation of the group: what it issues, on any group, ends before its calls return.

        For an operation of several stages that must not mix with others': whatever a rank has
        queued meanwhile waits behind it.

        Collective: over the group, as far as ``function`` is.

        Args:
            async_op: On the group's thread, in its turn; else in this one, if nothing is queued.
            device: A CUDA device on which ``function`` queues work: there it comes behind what the
                current stream has been given, and before what it is given after ``wait``.
            operation: Its name in messages and reports.
            facts: What must be equal on all ranks; compared in debug mode.
            results: What the Work's future holds in the end.

        Returns:
            A Work if ``async_op``, else None after the end.
        """
        here = device_at(device)
        if here is None:
            return self._launch(
                operation, _call, (), (), (function,), async_op, facts, results=results
            )
        events: list[Any] = []
        args = (function, StreamFence(here, ()), events)
        return self._launch(
            operation, _call_on_device, (), (), args, async_op, facts, events, here, results
        )

    def peers_of(self, rank: int | None) -> tuple[int, ...]:
        """Return the world ranks without which a message to or from ``rank`` cannot end; all others for any source."""
        if rank is None:
            return self.world_ranks[: self.rank] + self.world_ranks[self.rank + 1 :]
        return (self.world_ranks[rank],)

    def __del__(self) -> None:
        # Closing is collective, and a finalizer must not communicate: the communicator stays, its
        # thread need not.
        if hasattr(self, "_progress") and not self._closed and self.size > 1:
            self._progress.abandon()
            if not sys.is_finalizing():
                warnings.warn(
                    f'group "{self.name}" was dropped without close(); its communicator is lost',
                    ResourceWarning,
                    2,
                )

    def _launch(
        self,
        operation: str,
        execute: Callable[..., None],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        args: tuple[Any, ...] = (),
        async_op: bool = False,
        facts: Facts = (),
        events: list[Any] | None = None,
        device: Device | None = None,
        results: Sequence[torch.Tensor] = (),
    ) -> Work | None:
        """Execute ``execute(comm, inputs, outputs, *args)`` in the group's order.

        Args:
            facts: What must be equal on all ranks, beside the operation and its number; compared in
                debug mode.
            events: Receives, from whoever executes, what the caller's stream has to wait for.
            device: Where it works, if the tensors do not tell.
            results: What the Work holds, if neither outputs nor inputs.

        Returns:
            A Work if ``async_op``, else None after the end.
        """
        self._require_usable(operation)
        self._entered = True
        events = [] if events is None else events
        if not all(buffer.is_direct(t) for t in inputs) or not all(
            buffer.is_direct(t) for t in outputs
        ):
            device = device_of((*inputs, *outputs))
            if device is None:
                execute = on_host(execute)
            else:
                execute = device_collectives.placed(
                    execute, device, inputs, outputs, args, events, self.size, async_op
                )
        call = (operation, execute, inputs, outputs, args, facts, results)
        if not async_op and self._progress.try_enter():
            try:
                self._execute(*call)
            finally:
                self._door.release()
            for event in events:
                event.block_current_stream()
            return None
        work = Work(
            operation,
            results or outputs or inputs,
            self.where(operation),
            events,
            None if device is None else device.record_current_stream,
        )
        if async_op and is_at_once():
            self._progress.run(work, self._execute, call)
            return work
        submit = self._progress.submit
        if torch_profiler._is_profiler_enabled:
            submit = profiling.queueing(submit, self, operation, inputs, outputs or results)
        self.journal.queued += 1
        submit(work, self._execute_queued, call)
        if async_op:
            return work
        work.wait()
        return None

    def _execute_queued(self, *call: Any) -> None:
        self.journal.queued -= 1
        self._execute(*call)

    def _execute(
        self,
        operation: str,
        execute: Callable[..., None],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        facts: Facts,
        results: Sequence[torch.Tensor],
    ) -> None:
        if self._failure is not None:
            self._raise_failure()
        self.journal.enter(operation, outputs[0] if outputs else inputs[0] if inputs else None)
        try:
            if self._debug:
                line = fingerprint.describe(operation, self.journal.sequence, facts)
                fingerprint.check(self._comm, self.where(operation), line)
            comm = self._comm_of_thread if self._progress.is_own_thread() else self._comm
            if torch_profiler._is_profiler_enabled:
                execute = profiling.executing(execute, self, operation, results)
            with autograd_mode.writing(inputs, outputs):
                execute(comm, inputs, outputs, *args)
        except Exception as error:
            explained = self._explain(error, operation)
            if explained is error:
                raise
            raise explained from error
        finally:
            self.journal.leave()

    def _telling(self, operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that arguments which are wrong on this rank alone raise on all ranks (debug mode)."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._entered = False
            try:
                return method(*args, **kwargs)
            except (TypeError, ValueError) as error:
                # raised by the operation itself, which the other ranks are in, too
                if self._entered:
                    raise
                refusal = (
                    (
                        fingerprint.REFUSAL,
                        str(error).removeprefix(self.where("")).replace(";", ","),
                    ),
                )
                # As the other ranks call it: two calls are told by the name of their plain form.
                name = (
                    operation.removesuffix("_coalesced") if "_tensor_" in operation else operation
                )
                self._launch(name, _nothing, (), (), facts=refusal)
                raise  # every rank refused it with the same words

        return call


def _check_of(group: weakref.ref[Execution]) -> Callable[[], None]:
    """Return a function that raises a group's failure; it does not keep the group alive."""

    def check() -> None:
        held = group()
        if held is not None:
            held._raise_failure()

    return check


def _nothing(comm: Communicator, inputs: Any, outputs: Any) -> None:
    return None


def _call(comm: Communicator, inputs: Any, outputs: Any, function: Callable[[], None]) -> None:
    with at_once():
        function()


def _call_on_device(
    comm: Communicator,
    inputs: Any,
    outputs: Any,
    function: Callable[[], None],
    fence: StreamFence,
    events: list[Any],
) -> None:
    fence.wait_ready_on_current_stream()
    _call(comm, inputs, outputs, function)
    events.append(fence.device.record_current_stream())
