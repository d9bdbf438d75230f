"""Fast path of the all-reduce: a call of MPI prepared once for each tensor's memory.

A training loop reduces the same buffers in every step. The path caches, by address, the arguments
of MPI's call. If a tensor's memory is in the cache, the group's queue is empty and its lock free,
the calling thread calls MPI without the checks and the objects of ``execution``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.algorithms import (
    low_precision,
    mpi_types,
    rank_order,
    reduce_op,
    reductions,
)
from mpidist.comm.algorithms.reduce_op import ReduceOp
from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.execution.op_status import IDLE, Description, Form
from mpidist.comm.execution.progress import Progress, is_at_once
from mpidist.comm.execution.work import Work
from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.recorder.ring import BeginNext

_CACHED = 256  # addresses
_STRIDED = torch.strided


@dataclass(frozen=True, slots=True)
class Call:
    """Prepared all-reduce of one address, valid for tensors of the same size, dtype and operation.

    Attributes:
        message: Buffer and datatype of one call of MPI; None if more than this call is needed.
        mpi_op: MPI's operation of that call.
        run: Reduces the tensor if ``message`` is None.
        description: The call in the group's journal.
        begin: Begins an entry of the call in the recorder; takes its number in the group.
    """

    nbytes: int
    dtype: torch.dtype
    op: ReduceOp
    message: tuple[Any, Any] | None
    mpi_op: Any
    run: Callable[[torch.Tensor], None] | None
    description: Description
    begin: BeginNext


class FastPath:
    """The fast path of one group's ``all_reduce``.

    Args:
        state: The group's state.
        progress: Its queue.
        helps: Threads that wait execute the queue.
        is_open: No call needs a check of its values.
    """

    def __init__(self, state: GroupState, progress: Progress, helps: bool, is_open: bool) -> None:
        self._state = state
        self._comm = state.comm
        self._progress = progress
        self._helps = helps
        self._journal = state.journal
        self._is_open = is_open
        self._calls: dict[int, Call] = {}  # by address
        # Looked up once, because each attribute access in the call costs 30 ns.
        self._mpi_allreduce = state.comm.mpi.Allreduce
        self._in_place = MPI.IN_PLACE
        self._enter, self._leave = progress.lock.acquire, progress.lock.release
        self._queued = progress.items
        self._help = progress.help
        self._note = state.journal.ended.append
        self._begins = state.recorder.begins
        self._end, self._fail = state.recorder.end, state.recorder.fail

    def close(self) -> None:
        """Return False from every later call."""
        self._is_open = False
        self.forget()

    def forget(self) -> None:
        """Empty the cache, because another algorithm may be chosen from now on."""
        self._calls = {}

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> bool:
        """Execute a group's synchronous ``all_reduce`` if the fast path applies.

        Writes below autograd, also into a leaf that requires grad.

        Returns:
            False if the call needs the queue, a check, a host copy or an event of a profiler; then
            nothing was done.
        """
        call = self.find(tensor, op)
        if call is None or self._queued or not self._enter(False):
            return False
        try:
            self.run(call, tensor)
        finally:
            self._leave()
        return True

    def all_reduce_later(self, tensor: torch.Tensor, op: ReduceOp) -> Work | None:
        """Queue the prepared call of a tensor; None if the fast path does not apply to it."""
        if is_at_once():
            return None
        call = self.find(tensor, op)
        if call is None:
            return None
        state = self._state
        if state.is_closed or state.failure is not None:
            state.require_usable("all_reduce")
        work = Work("all_reduce", (tensor,), state.where("all_reduce"))
        if self._helps:
            work.helped_by(self._help)
        self._progress.submit(work, partial(self._run_later, call, tensor))
        return work

    def find(self, tensor: torch.Tensor, op: ReduceOp) -> Call | None:
        """Return the prepared call of a tensor; None if the fast path does not apply to it."""
        if (
            torch_profiler._is_profiler_enabled
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        address = tensor.data_ptr()
        call = self._calls.get(address)
        if (
            call is None
            or call.nbytes != tensor.nbytes
            or call.dtype is not tensor.dtype
            or call.op is not op
        ):
            call = self._prepare(address, tensor, op)
        if (
            call is not None
            and call.run is not None
            and (tensor.requires_grad or tensor.is_inference())
        ):
            return None  # autograd would record the arithmetic, or inference mode is needed
        return call

    def run(self, call: Call, tensor: torch.Tensor) -> None:
        """Execute a prepared call, in the thread that holds the lock of ``Progress``."""
        journal = self._journal
        journal.description = call.description
        journal.sequence = sequence = journal.sequence + 1
        journal.operation = "all_reduce"
        journal.tensor = tensor
        end, number = self._end, call.begin(sequence)
        try:
            if call.run is None:
                self._mpi_allreduce(self._in_place, call.message, call.mpi_op)
            else:
                call.run(tensor)
        except Exception as error:
            end = self._fail
            raise self._state.explain(error, "all_reduce") from error
        finally:
            journal.tensor = IDLE
            self._note(call.description)
            end(number)

    def _run_later(self, call: Call, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        if self._state.failure is not None:
            self._state.raise_failure()
        self.run(call, tensor)
        return (tensor,)

    def _prepare(self, address: int, tensor: torch.Tensor, op: ReduceOp) -> Call | None:
        """Return the prepared call of this memory; None if the fast path does not apply."""
        dtype = tensor.dtype
        # Conjugate views share their original's memory.
        if (
            not self._is_open
            or type(tensor) is not torch.Tensor
            or not isinstance(op, str)
            or dtype.is_complex
        ):
            return None
        try:
            plan = reduce_op.reduction(dtype, op)
        except (TypeError, ValueError):
            return None  # the normal path raises the error
        both = (Form(tensor.shape, dtype),)
        description = Description("all_reduce", both, both)
        begin = self._begins(
            self._journal.signatures["all_reduce", dtype, tensor.shape], tensor.nbytes
        )
        if reductions.is_one_call(self._comm, tensor, plan):
            message = (buffer.memory(address, tensor.nbytes), mpi_types.datatypes()[dtype])
            mpi_op = mpi_types.datatype_and_op(dtype, plan)[1]
            call = Call(tensor.nbytes, dtype, op, message, mpi_op, None, description, begin)
        else:
            of = rank_order if rank_order.applies(self._comm, dtype, plan) else low_precision
            run = of.prepared(self._comm, tensor, plan) or partial(_all_reduce, self._comm, op)
            call = Call(tensor.nbytes, dtype, op, None, None, run, description, begin)
        if len(self._calls) >= _CACHED:
            self._calls.clear()
        self._calls[address] = call
        return call


def _all_reduce(comm: Communicator, op: ReduceOp, tensor: torch.Tensor) -> None:
    reductions.all_reduce(comm, (), (tensor,), op)
