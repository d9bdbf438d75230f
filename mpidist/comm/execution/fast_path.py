"""Fast path of short synchronous collectives: a call of MPI prepared once for the tensors' memory.

A training loop reduces, broadcasts and gathers the same buffers in every step. The path caches, by
address, the arguments of MPI's call. If the tensors' memory is in the cache, the group's queue is
empty and its lock free, the calling thread calls MPI without the checks and the objects of
``execution``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.algorithms import (
    low_precision,
    movement,
    mpi_types,
    prepared_movement,
    rank_order,
    reduce_op,
    reductions,
)
from mpidist.comm.algorithms.reduce_op import ReduceOp
from mpidist.comm.execution.arguments import has_memory
from mpidist.comm.execution.execution import Execution, keeps_place
from mpidist.comm.execution.op_status import IDLE, described_as
from mpidist.comm.execution.operation import Operation
from mpidist.comm.execution.progress import here
from mpidist.comm.execution.work import Work
from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.recorder.collective_begins import Described

_CACHED = 256  # calls
_CLOSED = ("closed",)  # in place of the queue: it is never empty
_STRIDED = torch.strided

_PLAIN = (int, str, type(None))
_LONGEST = 64  # tensors of a list: the cache keeps the address of each

Describe: TypeAlias = Callable[..., Operation]

_PREPARED: dict[Callable[..., Any], Callable[..., prepared_movement.Run | None]] = {
    movement.barrier: prepared_movement.barrier,
    movement.broadcast: prepared_movement.broadcast,
    movement.all_gather: prepared_movement.all_gather,
    movement.all_gather_into: prepared_movement.all_gather_into,
}


@dataclass(frozen=True, slots=True)
class Call:
    """Prepared collective, for known memory.

    Attributes:
        run: Executes it, in the thread that holds the lock of ``Progress``. Takes the tensor that a
            report names meanwhile (or None), all tensors, and what torch works on: the tensor of
            a ``Reduction``, inputs and outputs of another collective, or nothing.
        takes_tensors: ``run`` takes these.
    """

    run: Callable[..., None]
    takes_tensors: bool


@dataclass(frozen=True, slots=True)
class Reduction(Call):
    """Prepared all-reduce, valid for tensors of the same shape, dtype and operation."""

    shape: torch.Size
    dtype: torch.dtype
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class Movement(Call):
    """Prepared collective of another kind, valid for equal arguments and tensors of equal forms.

    Attributes:
        inputs: Places of the operation's inputs among the tensors of the call's arguments.
        outputs: Places of its outputs; None if they are the inputs.
        shown: Place of the tensor that a report names; None without one.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...] | None
    shown: int | None


class FastPath:
    """The fast path of one group's collectives.

    Args:
        execution: The group's.
    """

    def __init__(self, execution: Execution) -> None:
        state, progress = execution.state, execution.progress
        # Not the object: the state refers to the path, and a group that is dropped ends at once.
        self._execution = weakref.ref(execution)
        self._state = state
        self._comm = state.comm
        self._progress = progress
        self._journal = state.journal
        self._where_all_reduce = state.where("all_reduce")
        # No call needs a check of its values.
        self._is_open = not (execution.is_debug or execution.checks_nan)
        self._calls: dict[int, Reduction] = {}  # by address, the last of each
        self._reductions: dict[tuple[object, ...], Reduction] = {}  # by address, form and operation
        # By what ``_flat`` returns.
        self._movements: dict[tuple[object, ...], Movement] = {}
        self._seen: set[int] = set()  # hashes of such keys
        # Looked up once, because each attribute access in the call costs 30 ns.
        self._enter: Callable[[bool], bool] = progress.lock.acquire
        self._leave = progress.lock.release
        if not self._comm.is_single_node:
            # The group's thread sleeps while it waits; a prepared call does not.
            self._enter = self._enter_outside_its_thread
        # Looked up under the lock: who ends an operation, or closes the group, holds it.
        self._queued: Sized = progress.items
        self._help = progress.help if execution.helps else progress.attend

    def close(self) -> None:
        """Return False from every later call, and from those that have not entered yet."""
        self._is_open = False
        self._queued = _CLOSED
        self.forget()

    def forget(self) -> None:
        """Empty the cache."""
        self._calls = {}
        self._reductions = {}
        self._movements = {}

    def take(self, describe: Describe, arguments: Sequence[object]) -> bool:
        """Execute a synchronous collective if the fast path applies.

        Args:
            describe: A function of ``collectives``: returns the operation, its arguments checked.
                Called once for arguments that are equal, with tensors of equal forms and memory,
                when they come the second time.
            arguments: Its arguments behind the first.

        Returns:
            False if the call needs ``Execution.launch``; then nothing was done.

        Raises:
            TypeError, ValueError: See ``describe``.
        """
        if not self._is_open or torch_profiler._is_profiler_enabled:
            return False
        flat = _flat(describe, arguments)
        if flat is None:
            return False
        key, tensors = flat
        call = self._movements.get(key)
        if call is None:
            if self._is_new(key):
                return False
            call = self._prepare_movement(key, tensors, describe(self._execution(), *arguments))
        operands: tuple[object, ...] = ()
        if call.takes_tensors:
            if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in tensors):
                return False  # torch writes them in inference mode alone
            inputs = [tensors[place] for place in call.inputs]
            outputs = call.outputs
            operands = inputs, inputs if outputs is None else [tensors[place] for place in outputs]
        if not self._enter(False):
            return False
        try:
            if self._queued:
                return False
            call.run(None if call.shown is None else tensors[call.shown], tensors, *operands)
        finally:
            self._leave()
        return True

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> bool:
        """Execute a group's synchronous ``all_reduce`` if the fast path applies.

        Writes below autograd, also into a leaf that requires grad.

        Returns:
            False if the call needs the queue, a check, a host copy or an event of a profiler; then
            nothing was done.
        """
        call = self.find(tensor, op)
        if call is None or not self._enter(False):
            return False
        try:
            if self._queued:
                return False
            if call.takes_tensors:
                call.run(tensor, None, tensor)
            else:
                call.run(tensor, None)
        finally:
            self._leave()
        return True

    def prepared(self, name: str, execute: Callable[[], object]) -> Callable[[], bool]:
        """Return a function that executes an operation without arguments if the path applies.

        It returns False if the operation needs the queue, a check or an event of a profiler; then
        nothing was done.
        """
        run = self._recorded(name, execute, described_as(name, (), ()))

        def at_once() -> bool:
            if not self._is_open or torch_profiler._is_profiler_enabled or not self._enter(False):
                return False
            try:
                if self._queued:
                    return False
                run(None, None)
            finally:
                self._leave()
            return True

        return at_once

    def all_reduce_later(self, tensor: torch.Tensor, op: ReduceOp) -> Work | None:
        """Queue the prepared call of a tensor; None if the fast path does not apply to it."""
        if here.is_at_once:
            return None
        call = self.find(tensor, op)
        if call is None:
            return None
        state = self._state
        if state.is_closed or state.failure is not None:
            state.require_usable("all_reduce")
        work = Work("all_reduce", (tensor,), self._where_all_reduce, None, None, self._help)
        self._progress.submit(work, partial(self._run_later, call, tensor))
        return work

    def find(self, tensor: torch.Tensor, op: ReduceOp) -> Reduction | None:
        """Return the prepared call of a tensor; None if the fast path does not apply to it."""
        if not self._is_open or torch_profiler._is_profiler_enabled or not tensor.is_cpu:
            return None
        if torch._C._is_tracing():
            return None  # refused by the normal path, also at an address that it knows
        try:
            address, shape = tensor.data_ptr(), tensor.shape
        except RuntimeError:  # a sparse layout, a nested tensor, or one of torch.func
            return None
        if not tensor.is_contiguous() or tensor.is_neg():
            return None
        call = self._calls.get(address)
        if (
            call is None
            or call.shape != shape
            or call.dtype is not tensor.dtype
            or call.op is not op
        ):
            call = self._prepare(address, tensor, op)
        if (
            call is not None
            and call.takes_tensors
            and (tensor.requires_grad or tensor.is_inference())
        ):
            return None  # autograd would record the arithmetic, or inference mode is needed
        return call

    def _is_new(self, key: tuple[object, ...]) -> bool:
        """Return whether a call has not been seen: most memory that comes once comes never again.

        To prepare a call takes longer than to execute it.
        """
        number, seen = hash(key), self._seen
        if number in seen:
            return False
        if len(seen) >= _CACHED:
            seen.clear()
        seen.add(number)
        return True

    def _enter_outside_its_thread(self, blocking: bool) -> bool:
        progress = self._progress
        return not progress.is_own_thread() and progress.lock.acquire(blocking)

    def _prepare_movement(
        self, key: tuple[object, ...], tensors: Sequence[torch.Tensor], operation: Operation
    ) -> Movement:
        inputs, outputs, args = operation.inputs, operation.outputs, operation.args
        prepared = _PREPARED.get(operation.execute)
        run = prepared and prepared(self._comm, inputs, outputs, *args)
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        shown = outputs or inputs
        call = Movement(
            self._recorded(
                operation.name,
                run or partial(_execute, operation.execute, self._comm, args),
                described_as(operation.name, inputs, outputs),
                operation.execute,
            ),
            run is None,
            tuple([places[id(tensor)] for tensor in inputs]),
            None if outputs is inputs else tuple([places[id(tensor)] for tensor in outputs]),
            places[id(shown[0])] if shown else None,
        )
        if len(self._movements) >= _CACHED:
            self._movements.clear()
        self._movements[key] = call
        return call

    def _recorded(
        self,
        name: str,
        execute: Callable[..., object],
        described: Described,
        executor: Callable[..., object] | None = None,
    ) -> Callable[..., None]:
        """Return ``execute`` with its entries in the journal and the recorder.

        Args:
            name: The collective's name.
            execute: Executes it.
            described: It, without its tensors' memory.
            executor: The function of ``algorithms`` that ``execute`` calls or stands for.
        """
        # In cells, as twelve attributes of objects take a tenth of a call.
        journal, state, comm = self._journal, self._state, self._comm
        begin, note = journal.begins[described], journal.ended.append
        end, fail = self._state.recorder.end, self._state.recorder.fail

        def run(
            tensor: torch.Tensor | None, held: Sequence[torch.Tensor] | None, *operands: object
        ) -> None:
            journal.described = described
            journal.sequence = sequence = journal.sequence + 1
            journal.operation = name
            journal.tensor = tensor
            number = begin(sequence)
            try:
                execute(*operands)
            except BaseException as error:
                journal.tensor = IDLE
                note(described)
                fail(number)
                if not keeps_place(executor, comm, error):
                    state.leave(error, name, execute, tensor, held, operands)
                if isinstance(error, Exception):
                    state.raise_explained(error, name)
                raise
            journal.tensor = IDLE
            note(described)
            end(number)

        return run

    def _run_later(self, call: Call, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        if self._state.failure is not None:
            self._state.raise_failure()
        call.run(tensor, None, *((tensor,) if call.takes_tensors else ()))
        return (tensor,)

    def _prepare(self, address: int, tensor: torch.Tensor, op: ReduceOp) -> Reduction | None:
        """Return the prepared call of this memory; None if the fast path does not apply."""
        dtype = tensor.dtype
        # Conjugate views share their original's memory.
        if (
            not self._is_open
            or type(tensor) is not torch.Tensor
            or tensor.layout is not _STRIDED
            or not isinstance(op, str)
            or dtype.is_complex
            or not has_memory(tensor)
        ):
            return None
        # Views of one memory may take turns.
        key = (address, tensor.shape, dtype, op)
        known = self._reductions.get(key)
        if known is not None:
            self._calls[address] = known
            return known
        try:
            plan = reduce_op.reduction(dtype, op)
        except (TypeError, ValueError):
            return None  # the normal path raises the error
        run: Callable[..., object] | None
        is_one_call = reductions.is_one_call(self._comm, tensor, plan)
        if is_one_call:
            message = (buffer.memory(address, tensor.nbytes), mpi_types.datatypes()[dtype])
            mpi_op = mpi_types.datatype_and_op(dtype, plan)[1]
            run = partial(self._comm.mpi.Allreduce, MPI.IN_PLACE, message, mpi_op)
        else:
            of = rank_order if rank_order.applies(self._comm, dtype, plan) else low_precision
            run = of.prepared(self._comm, tensor, plan) or partial(_all_reduce, self._comm, op)
        both = ((tensor.shape, dtype),)
        run = self._recorded("all_reduce", run, ("all_reduce", both, both))
        call = Reduction(run, not is_one_call, tensor.shape, dtype, op)
        if len(self._reductions) >= _CACHED:
            self._calls.clear()
            self._reductions.clear()
        self._calls[address] = self._reductions[key] = call
        return call


def _flat(
    describe: Describe, arguments: Sequence[object]
) -> tuple[tuple[object, ...], list[torch.Tensor]] | None:
    """Return the key of a call among the prepared ones, and the tensors of its arguments.

    The key holds address, shape and dtype of each tensor, a mark before each list, and the value of
    every other argument. None if the call cannot be prepared.
    """
    key: list[object] = [describe]
    tensors: list[torch.Tensor] = []
    for argument in arguments:
        kind = type(argument)
        items: Any = argument
        if kind is torch.Tensor:
            items = (argument,)
        elif kind is tuple or kind is list:
            if len(items) > _LONGEST:
                return None
            key.append(kind)  # begins a list: no argument of another kind is a type
        elif kind in _PLAIN:  # a bool equals a rank, and is none
            key.append(argument)
            continue
        else:
            return None
        for item in items:
            if type(item) is int:  # of split sizes
                key.append(item)
                continue
            if (
                type(item) is not torch.Tensor
                or not item.is_cpu
                or item.layout is not _STRIDED
                or not item.is_contiguous()
                or item.is_neg()
                or item.is_conj()
                or item.requires_grad
            ):
                return None
            try:
                key += (item.data_ptr(), item.shape, item.dtype)
            except RuntimeError:  # a nested tensor, or one of torch.func
                return None
            tensors.append(item)
    return tuple(key), tensors


def _execute(
    execute: Callable[..., object],
    comm: Communicator,
    args: tuple[object, ...],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> None:
    execute(comm, inputs, outputs, *args)


def _all_reduce(comm: Communicator, op: ReduceOp, tensor: torch.Tensor) -> None:
    reductions.all_reduce(comm, (), (tensor,), op)
