"""The shortest path from an all-reduce to MPI, for what a code on a cluster calls thousands of times a second.

It remembers, by address, how a tensor's memory is reduced; a training loop reduces the same buffers
in every step. A call that finds its memory known, the queue empty and the door open goes straight
to MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.algorithms import low_precision, mpi_types, reduce_op, reductions
from mpidist.comm.algorithms.reduce_op import Operation
from mpidist.comm.memory import buffer
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.op_status import IDLE, Journal
from mpidist.comm.progress import Progress

_REMEMBERED = 256  # addresses


@dataclass(frozen=True, slots=True)
class _Call:
    """An all-reduce of known memory: what to compare a tensor with, and how it is reduced."""

    nbytes: int
    dtype: torch.dtype
    op: Operation
    message: tuple[Any, Any] | None  # for one call of MPI
    mpi_op: Any
    run: Callable[[torch.Tensor], None] | None  # for anything else


class FastPath:
    """The fast path of one group."""

    def __init__(
        self,
        comm: Communicator,
        progress: Progress,
        journal: Journal,
        explain: Callable[[Exception, str], Exception],
        is_open: bool,
    ) -> None:
        self._comm = comm
        self._progress = progress
        self._journal = journal
        self._explain = explain
        self._is_open = is_open
        self._calls: dict[int, _Call] = {}  # by address
        # Looked up once: each attribute read less is 30 ns.
        self._mpi_allreduce = comm.mpi.Allreduce
        self._in_place = MPI.IN_PLACE
        self._enter, self._leave = progress.lock.acquire, progress.lock.release

    def close(self) -> None:
        """Refuse every call from now on."""
        self._is_open = False
        self.forget()

    def forget(self) -> None:
        """Drop what is remembered: another algorithm may be chosen from now on."""
        self._calls = {}

    def all_reduce(self, tensor: torch.Tensor, op: Operation) -> bool:
        """Do a group's ``all_reduce`` if it needs no queue, no check, no host copy and no event of a profiler; else return False.

        Below autograd: it writes into a leaf.
        """
        if (
            torch_profiler._is_profiler_enabled
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return False
        address = tensor.data_ptr()
        call = self._calls.get(address)
        if (
            call is None
            or call.nbytes != tensor.nbytes
            or call.dtype is not tensor.dtype
            or call.op is not op
        ):
            call = self._remember(address, tensor, op)
            if call is None:
                return False
        if call.run is not None and (tensor.requires_grad or tensor.is_inference()):
            return False  # torch's arithmetic would record it, or needs inference mode
        if self._progress.pending or not self._enter(False):
            return False
        journal = self._journal
        journal.sequence += 1
        journal.operation = "all_reduce"
        journal.tensor = tensor
        try:
            if call.run is None:
                self._mpi_allreduce(self._in_place, call.message, call.mpi_op)
            else:
                call.run(tensor)
        except Exception as error:
            raise self._explain(error, "all_reduce") from error
        finally:
            journal.tensor = IDLE
            self._leave()
        return True

    def _remember(self, address: int, tensor: torch.Tensor, op: Operation) -> _Call | None:
        """Return how this memory is reduced, or None if not by this path."""
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
            return None  # the long way says what is wrong, and where
        if reductions.is_one_call(self._comm, tensor, plan):
            message = (buffer.memory(address, tensor.nbytes), mpi_types.datatypes()[dtype])
            call = _Call(
                tensor.nbytes, dtype, op, message, mpi_types.datatype_and_op(dtype, plan)[1], None
            )
        else:
            run = low_precision.prepared(self._comm, tensor, plan) or partial(
                _all_reduce, self._comm, op
            )
            call = _Call(tensor.nbytes, dtype, op, None, None, run)
        if len(self._calls) >= _REMEMBERED:
            self._calls.clear()
        self._calls[address] = call
        return call


def _all_reduce(comm: Communicator, op: Operation, tensor: torch.Tensor) -> None:
    reductions.all_reduce(comm, (), (tensor,), op)
