"""Execution of collectives: debug checks, order, journal, typed errors."""

from __future__ import annotations

import copy
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

from mpidist.comm.algorithms import broadcasts, device_collectives, fingerprint, movement
from mpidist.comm.algorithms.host_copies import on_host
from mpidist.comm.execution import nan_check, profiling
from mpidist.comm.execution.arguments import Checks
from mpidist.comm.execution.group_settings import RAISE
from mpidist.comm.execution.group_state import GroupState
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


class Execution:
    """Execution of one group's operations, one at a time, in one order.

    In debug mode (``MPIDIST_DEBUG=1``) all ranks compare their operations before each collective,
    and a rank that refuses its arguments reports this to the others.

    Args:
        state: The group's state.
        progress: Its queue and thread.
        debug: Debug mode; ``MPIDIST_DEBUG=1`` if None.

    Attributes:
        is_debug: Debug mode.
        checks_nan: Operations look for NaN in what this rank contributes.
        helps: Threads that wait execute what they wait for.
    """

    def __init__(self, state: GroupState, progress: Progress, debug: bool | None = None) -> None:
        comm = state.comm
        self.state = state
        self.progress = progress
        self._comm = comm
        progress.left = _left_of(weakref.ref(state))
        # On several nodes the group's thread sleeps in long waits, and leaves its core to others.
        self._comm_of_thread = comm if comm.is_single_node else comm.sleeping()
        if state.on_timeout == RAISE:
            check = _check_of(weakref.ref(state))
            self._comm_of_thread = comm.sleeping()
            self._comm_of_thread.mpi = nonblocking.abandonable(
                comm.plain, check, sleeps=not comm.is_single_node
            )
            comm.mpi = nonblocking.abandonable(comm.plain, check, sleeps=False)
        # With more ranks than cores, a thread that sleeps leaves its core to a rank that the
        # operation waits for.
        self.helps = comm.nodes.count(comm.nodes[comm.rank]) <= (os.cpu_count() or 1)
        self.is_debug = os.environ.get(_ENV_DEBUG) == "1" if debug is None else debug
        self.checks_nan = nan_check.is_asked(os.environ)
        self._checks: dict[str, Checks] = {}  # by operation
        # Not in debug mode, where ranks compare their operations before each.
        if not (comm.is_single_node or self.is_debug):
            comm.kept[broadcasts.UPCOMING] = partial(_upcoming_broadcast, progress)

    def in_order(
        self,
        function: Callable[[], object],
        async_op: bool,
        device: torch.device | None,
        operation: str,
        facts: Facts = (),
        results: Tensors = (),
    ) -> Any:
        """Execute ``function()`` as one operation; see ``ProcessGroup.in_order``."""
        here = device_at(device)
        function = partial(self.state.journal.within, function)
        if here is None:
            described = Operation(operation, call, (), (), (function,), facts, results)
        else:
            events: list[Event] = []
            args = (function, StreamFence(here, ()), events)
            described = Operation(
                operation, call_on_device, (), (), args, facts, results, here, events
            )
        return self.launch(described, async_op)

    def __del__(self) -> None:
        # Closing is collective, and a finalizer must not communicate. So the communicator is lost,
        # and only the thread ends.
        state = self.state
        if not state.is_closed and state.size > 1:
            self.progress.abandon()
            # Without ``sys`` the interpreter has cleared this module.
            if sys is not None and not sys.is_finalizing():
                warnings.warn(
                    f'group "{state.name}" was dropped without close(); its communicator is lost',
                    ResourceWarning,
                    2,
                )

    def require_no_nan(self, operation: str, tensors: Tensors) -> None:
        """Look for NaN in what this rank contributes to an operation, if that is asked for."""
        if self.checks_nan:
            nan_check.require_none(self.state.where(operation), tensors)

    def checked(self, operation: str) -> Checks:
        """Return the context of an operation's argument checks; it yields ``where(operation)``.

        In debug mode a TypeError or ValueError within the context is raised on all ranks, as a
        DisagreementError if other ranks accept their arguments.
        """
        checks = self._checks.get(operation)
        if checks is None:
            report = partial(self._report_refusal, operation) if self.is_debug else None
            checks = self._checks[operation] = Checks(self.state.where(operation), report)
        return checks

    def launch(self, operation: Operation, async_op: bool = False) -> Any:
        """Execute an operation in the group's order.

        Returns:
            A Work if ``async_op``, else what ``operation.execute`` has returned.
        """
        state = self.state
        if state.is_closed or state.failure is not None:
            state.require_usable(operation.name)
        # Fast paths know operations by their shapes, which are no numbers in a trace.
        if torch._C._is_tracing():
            raise MpidistError(
                f"{state.where(operation.name)} was called within torch.jit.trace, which would "
                "keep the results of this call as constants: trace a module that does not "
                "communicate, or use torch.compile"
            )
        if self.checks_nan:
            self.require_no_nan(operation.name, operation.inputs)
        if torch_profiler._is_profiler_enabled:
            operation.title = profiling.requested_name()
        has_tensors = operation.inputs or operation.outputs
        if has_tensors and not operation.is_direct():
            operation = self._copied(operation, async_op)
        if not async_op and self.progress.try_enter():
            try:
                result = self._execute(operation)
            finally:
                self.progress.leave()
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
            self.state.size,
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
            self.state.where(operation.name),
            operation.events,
            None if device is None else device.record_current_stream,
        )
        execute = partial(self._execute_for_work, operation)
        if is_at_once():
            self.progress.run(work, execute)
        else:
            self._submit(work, execute, operation)
        return work

    def _submit(
        self, completion: Future[Any] | Work, execute: Callable[[], object], operation: Operation
    ) -> None:
        submit, help = self.progress.submit, self.progress.attend
        if torch_profiler._is_profiler_enabled:
            # A profile keeps one row for each thread: the operations, and the waits for them.
            submit = profiling.queueing(submit, self.state, operation)
        elif self.helps and operation.device is None:
            # On a device the group's thread overlaps with the host.
            help = self.progress.help
        completion.helped_by(help)
        submit(completion, execute)

    def _execute_for_work(self, operation: Operation) -> Tensors:
        self._execute(operation)
        return operation.work_results()

    def _execute(self, operation: Operation) -> Any:
        state = self.state
        # Under the lock, which a thread that closes the group holds.
        if state.is_closed or state.failure is not None:
            state.require_usable(operation.name)
        inputs, outputs, journal = operation.inputs, operation.outputs, state.journal
        number, is_failed = journal.enter(operation.name, inputs, outputs), False
        try:
            if self.is_debug:
                line = fingerprint.describe(operation.name, journal.sequence, operation.facts)
                fingerprint.check(self._comm, state.where(operation.name), line)
            comm = self._comm_of_thread if self.progress.is_own_thread() else self._comm
            execute = operation.execute
            if torch_profiler._is_profiler_enabled:
                execute = profiling.executing(execute, state, operation)
            mode = autograd_mode.to_write(inputs, outputs)
            # Entering a context that changes nothing costs as much as the look.
            if mode is None:
                return execute(comm, inputs, outputs, *operation.args)
            with mode:
                return execute(comm, inputs, outputs, *operation.args)
        except BaseException as error:
            is_failed = True
            if not keeps_place(operation.execute, self._comm, error):
                state.leave(error, operation.name, operation)
            if isinstance(error, Exception):
                state.raise_explained(error, operation.name)
            raise
        finally:
            journal.leave(number, is_failed)

    def _report_refusal(self, operation: str, error: Exception) -> None:
        """Compare this rank's refusal of its arguments with the other ranks (debug mode).

        Raises:
            DisagreementError: Other ranks did not refuse with the same words.
        """
        text = str(error).removeprefix(self.state.where("")).replace(";", ",")
        self.launch(Operation(operation, refuse, facts=((fingerprint.REFUSAL, text),)))


def keeps_place(execute: object, comm: Communicator, error: BaseException) -> bool:
    """Return whether an executor that an exception has left keeps its group's order and memory.

    Operations within ``in_order`` are the group's own. An interrupt may come between two of them.
    """
    if execute is movement.broadcast:
        return broadcasts.applies(comm)
    return execute in (call, call_on_device) and isinstance(error, Exception)


def _upcoming_broadcast(progress: Progress, place: int) -> tuple[Tensors, int] | None:
    """Return tensors and root of a queued broadcast that may begin before its turn, or None.

    It may if all before it are broadcasts, from the one that is executed on, and none of those runs
    a callback, which may issue collectives that come first. A callback that is added later precedes
    operations that were queued before it on some ranks and not on others in any case.

    Args:
        place: Its place in the queue. Those before it have begun.
    """
    executed = progress.popped
    # A callback, or a function of ``in_order``, may issue more behind its broadcast.
    if executed is None or _broadcast_of(executed) is None:
        return None
    try:
        before = progress.items[place - 1] if place else executed
        operation = _broadcast_of(progress.items[place])
    except IndexError:
        return None
    if operation is None or before[0] is None or before[0].has_callbacks():
        return None
    (root,) = operation.args
    return operation.inputs or operation.outputs, root


def _broadcast_of(item: tuple[object, Callable[[], object]]) -> Operation | None:
    _, execute = item
    operation = execute.args[0] if isinstance(execute, partial) else None
    if isinstance(operation, Operation) and operation.execute is movement.broadcast:
        return operation
    return None


def _left_of(
    state: weakref.ref[GroupState],
) -> Callable[[BaseException], BaseException]:
    """Return a function that fails a group whose queued operation an interrupt has left."""

    def left(interrupt: BaseException) -> BaseException:
        held = state()
        if held is None:
            return interrupt
        held.leave(interrupt, held.journal.operation)
        return copy.copy(held.failure or interrupt)

    return left


def _check_of(state: weakref.ref[GroupState]) -> Callable[[], None]:
    """Return a function that raises a group's failure, without a reference to the group."""

    def check() -> None:
        held = state()
        if held is not None:
            held.raise_failure()

    return check
