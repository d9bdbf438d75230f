"""Execution of collectives: usability of the group, debug checks, order, journal, typed errors."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.algorithms import device_collectives, fingerprint
from mpidist.comm.algorithms.host_copies import on_host
from mpidist.comm.execution import nan_check, profiling
from mpidist.comm.execution.arguments import Checks
from mpidist.comm.execution.group_failure import Failing
from mpidist.comm.execution.group_settings import RAISE, GroupSettings
from mpidist.comm.execution.op_status import Journal
from mpidist.comm.execution.operation import Facts, Operation, Tensors, call, call_on_device, refuse
from mpidist.comm.execution.progress import Progress, is_at_once
from mpidist.comm.execution.work import Work
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import Event, device_at, device_of
from mpidist.comm.mpi import autograd_mode, nonblocking
from mpidist.comm.mpi.communicator import Communicator
from mpidist.errors import MpidistError
from mpidist.future import Future

_ENV_DEBUG = "MPIDIST_DEBUG"  # "1": debug mode

_groups: weakref.WeakSet[Execution] = weakref.WeakSet()


def open_groups() -> list[Execution]:
    """Return the groups of this process that are not closed."""
    return [group for group in list(_groups) if not group.is_closed]


def _forbid_in_child() -> None:
    # A forked child shares the parent's connections; its MPI calls would answer for the parent.
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
    """Base of a process group: executes its collectives in one order.

    In debug mode (``MPIDIST_DEBUG=1``) all ranks compare their operations before each collective,
    and a rank that refuses its arguments reports this to the others.

    Attributes:
        key: Identifies the group; the same text on all its ranks.
        timeout_s: Longest time of an operation until the watchdog reports it; None for no limit.
        journal: The operation that the group executes.
    """

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        self.key = settings.key
        self.timeout_s = settings.timeout_s
        # On several nodes the group's thread sleeps in long waits, and leaves its core to others.
        self._comm_of_thread = comm if comm.is_single_node else comm.sleeping()
        if self.on_timeout == RAISE:
            check = _check_of(weakref.ref(self))
            self._comm_of_thread = comm.sleeping()
            self._comm_of_thread.mpi = nonblocking.abandonable(
                comm.plain, check, sleeps=not comm.is_single_node
            )
            comm.mpi = nonblocking.abandonable(comm.plain, check, sleeps=False)
        self._progress = Progress(self.name)
        # With more ranks than cores, a thread that sleeps leaves its core to a rank that the
        # operation waits for.
        self._helps = comm.nodes.count(comm.nodes[comm.rank]) <= (os.cpu_count() or 1)
        self.journal = Journal(self.name, self.key, self._progress.queued)
        debug = settings.debug
        self._debug = os.environ.get(_ENV_DEBUG) == "1" if debug is None else debug
        self._checks_nan = nan_check.is_asked(os.environ)
        self._checks: dict[str, Checks] = {}  # by operation
        _groups.add(self)

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
        function: Callable[[], object],
        async_op: bool = True,
        device: torch.device | None = None,
        *,
        operation: str = "in_order",
        facts: Facts = (),
        results: Tensors = (),
    ) -> Any:
        """Execute ``function()`` as one operation of the group.

        Operations that ``function`` issues, on any group, have ended when their calls return. What
        other threads of this rank issue meanwhile is queued behind it, so an operation of several
        stages does not mix with others.

        Collective: over the group, as far as ``function`` is.

        Args:
            async_op: Execute on the group's thread, behind the queue; else in the calling thread,
                if nothing is queued.
            device: CUDA device on which ``function`` queues work. That work follows the present
                work of the current stream; work queued after ``wait`` follows it.
            operation: The name in messages and reports.
            facts: Values that must be equal on all ranks; compared in debug mode.
            results: Value of the Work's future.

        Returns:
            A Work if ``async_op``, else what ``function`` has returned.
        """
        here = device_at(device)
        function = partial(self.journal.within, function)
        if here is None:
            described = Operation(operation, call, (), (), (function,), facts, results)
        else:
            events: list[Event] = []
            args = (function, StreamFence(here, ()), events)
            described = Operation(
                operation, call_on_device, (), (), args, facts, results, here, events
            )
        return self._launch(described, async_op)

    def peers_of(self, rank: int | None) -> tuple[int, ...]:
        """Return the world ranks that a message to or from ``rank`` needs; all others if None."""
        if rank is None:
            return self.world_ranks[: self.rank] + self.world_ranks[self.rank + 1 :]
        return (self.world_ranks[rank],)

    def __del__(self) -> None:
        # Closing is collective, and a finalizer must not communicate. So the communicator is lost,
        # and only the thread ends.
        if hasattr(self, "_progress") and not self._closed and self.size > 1:
            self._progress.abandon()
            if not sys.is_finalizing():
                warnings.warn(
                    f'group "{self.name}" was dropped without close(); its communicator is lost',
                    ResourceWarning,
                    2,
                )

    def _require_no_nan(self, operation: str, tensors: Tensors) -> None:
        """Look for NaN in what this rank contributes to an operation, if that is asked for."""
        if self._checks_nan:
            nan_check.require_none(self.where(operation), tensors)

    def _checked(self, operation: str) -> Checks:
        """Return the context of an operation's argument checks; it yields ``where(operation)``.

        In debug mode a TypeError or ValueError within the context is raised on all ranks, as a
        DisagreementError if other ranks accept their arguments.
        """
        checks = self._checks.get(operation)
        if checks is None:
            report = partial(self._report_refusal, operation) if self._debug else None
            checks = self._checks[operation] = Checks(self.where(operation), report)
        return checks

    def _launch(self, operation: Operation, async_op: bool = False) -> Any:
        """Execute an operation in the group's order.

        Returns:
            A Work if ``async_op``, else what ``operation.execute`` has returned.
        """
        self._require_usable(operation.name)
        self._require_no_nan(operation.name, operation.inputs)
        if torch_profiler._is_profiler_enabled:
            operation.title = profiling.requested_name()
        if not operation.is_direct():
            operation = self._copied(operation, async_op)
        if not async_op and self._progress.try_enter():
            try:
                result = self._execute(operation)
            finally:
                self._progress.leave()
            for event in operation.events:
                event.block_current_stream()
            return result
        return self._queue(operation, async_op)

    def _copied(self, operation: Operation, async_op: bool) -> Operation:
        """Return an operation that works on host copies or on device memory."""
        device = device_of((*operation.inputs, *operation.outputs))
        if device is None:
            return replace(operation, execute=on_host(operation.execute))
        events: list[Event] = []
        execute = device_collectives.placed(
            operation.execute,
            device,
            operation.inputs,
            operation.outputs,
            operation.args,
            events,
            self.size,
            async_op,
        )
        return replace(operation, execute=execute, device=device, events=events)

    def _queue(self, operation: Operation, async_op: bool) -> Any:
        if not async_op:
            future: Future[object] = Future(operation.events)
            self._submit(future, partial(self._execute, operation), operation)
            wait = future.wait
            if torch_profiler._is_profiler_enabled and not future.done():
                wait = profiling.waiting(wait, operation.name)
            return wait()
        device = operation.device
        work = Work(
            operation.name,
            operation.work_results(),
            self.where(operation.name),
            operation.events,
            None if device is None else device.record_current_stream,
        )
        execute = partial(self._execute_for_work, operation)
        if is_at_once():
            self._progress.run(work.future, execute)
        else:
            self._submit(work.future, execute, operation)
        return work

    def _submit(
        self, future: Future[Any], execute: Callable[[], object], operation: Operation
    ) -> None:
        submit = self._progress.submit
        if torch_profiler._is_profiler_enabled:
            # A profile keeps one row for each thread: the operations, and the waits for them.
            submit = profiling.queueing(submit, self, operation)
        elif self._helps and operation.device is None:
            # On a device the group's thread overlaps with the host.
            future.helped_by(self._progress.help)
        submit(future, execute)

    def _execute_for_work(self, operation: Operation) -> Tensors:
        self._execute(operation)
        return operation.work_results()

    def _execute(self, operation: Operation) -> Any:
        if self._failure is not None:
            self._raise_failure()
        inputs, outputs = operation.inputs, operation.outputs
        self.journal.enter(operation.name, inputs, outputs)
        try:
            if self._debug:
                line = fingerprint.describe(operation.name, self.journal.sequence, operation.facts)
                fingerprint.check(self._comm, self.where(operation.name), line)
            comm = self._comm_of_thread if self._progress.is_own_thread() else self._comm
            execute = operation.execute
            if torch_profiler._is_profiler_enabled:
                execute = profiling.executing(execute, self, operation)
            with autograd_mode.writing(inputs, outputs):
                return execute(comm, inputs, outputs, *operation.args)
        except Exception as error:
            explained = self._explain(error, operation.name)
            if explained is error:
                raise
            raise explained from error
        finally:
            self.journal.leave()

    def _report_refusal(self, operation: str, error: Exception) -> None:
        """Compare this rank's refusal of its arguments with the other ranks (debug mode).

        Raises:
            DisagreementError: Other ranks did not refuse with the same words.
        """
        text = str(error).removeprefix(self.where("")).replace(";", ",")
        self._launch(Operation(operation, refuse, facts=((fingerprint.REFUSAL, text),)))


def _check_of(group: weakref.ref[Execution]) -> Callable[[], None]:
    """Return a function that raises a group's failure, without a reference to the group."""

    def check() -> None:
        held = group()
        if held is not None:
            held._raise_failure()

    return check
