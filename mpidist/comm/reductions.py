"""Reductions of a process group: all-reduce, reduce and reduce-scatter.

The rules of ``collectives`` hold here too. Letters: W ranks of the group; N elements of one
contribution.
"""

from __future__ import annotations

from functools import partial

import torch

from mpidist.comm.algorithms import reductions, sparse
from mpidist.comm.algorithms.reduce_op import SUM, ReduceOp
from mpidist.comm.execution import arguments
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.fast_path import Call, FastPath
from mpidist.comm.execution.group_settings import GroupSettings
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.execution.progress import is_at_once
from mpidist.comm.execution.work import Work
from mpidist.comm.mpi.communicator import Communicator

Tensor = torch.Tensor


class Reductions(Execution):
    """The collective calls of a process group that compute."""

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        is_open = not (self._debug or self._checks_nan)
        self._fast_path = FastPath(comm, self._progress, self.journal, self._explain, is_open)
        self.all_reduce_at_once = self._fast_path.all_reduce

    def _close_fast_path(self) -> None:
        self._fast_path.close()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = SUM, async_op: bool = False) -> Work | None:
        """Reduce ``tensor`` (any shape, equal on all ranks) over all ranks, in place.

        All ranks get the same bits. Sums and products of integers wrap around; AVG divides the
        wrapped sum. A sparse COO tensor is reduced by SUM or AVG, may hold different elements on
        each rank, and becomes a coalesced one.
        """
        if isinstance(tensor, Tensor) and not tensor.requires_grad:
            if async_op:
                work = self._all_reduce_later(tensor, op)
                if work is not None:
                    return work
            elif self.all_reduce_at_once(tensor, op):
                return None
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._all_reduce_sparse(tensor, op, async_op)
        with self._checked("all_reduce") as where:
            arguments.tensor(where, tensor, "tensor")
            arguments.writable(where, tensor, "tensor")
            arguments.operation(where, tensor.dtype, op)
        both, facts = (tensor,), (("tensor", tensor), ("op", op))
        return self._launch(
            Operation("all_reduce", reductions.all_reduce, both, both, (op,), facts), async_op
        )

    def _all_reduce_later(self, tensor: Tensor, op: ReduceOp) -> Work | None:
        """Queue the prepared call of a tensor; None if the fast path does not apply to it."""
        # Between nodes the group's thread sleeps while it waits, and a prepared call does not.
        if not self.is_single_node or is_at_once() or self._progress.is_own_thread():
            return None
        call = self._fast_path.find(tensor, op)
        if call is None:
            return None
        self._require_usable("all_reduce")
        work = Work("all_reduce", (tensor,), self.where("all_reduce"))
        if self._helps:
            work.future.helped_by(self._progress.help)
        self._progress.submit(work.future, partial(self._run_prepared, call, tensor))
        return work

    def _run_prepared(self, call: Call, tensor: Tensor) -> Tensors:
        if self._failure is not None:
            self._raise_failure()
        self._fast_path.run(call, tensor)
        return (tensor,)

    def all_reduce_coalesced(
        self, tensors: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce each tensor of a list (one dtype, one device) in place, as one operation."""
        name = "all_reduce_coalesced"
        with self._checked(name) as where:
            arguments.tensors(where, tensors, "tensors")
            for tensor in tensors:
                arguments.writable(where, tensor, "tensors")
            arguments.operation(where, tensors[0].dtype, op)
        facts = (("tensors", tensors), ("op", op))
        return self._launch(
            Operation(name, reductions.all_reduce_flat, tensors, tensors, (op,), facts), async_op
        )

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce ``tensor`` over all ranks into rank ``dst``'s; the others' keep their values."""
        with self._checked("reduce") as where:
            arguments.tensor(where, tensor, "tensor")
            arguments.rank(where, dst, "dst", self.size)
            arguments.operation(where, tensor.dtype, op)
            if self.rank == dst:
                arguments.writable(where, tensor, "tensor")
        outputs = (tensor,) if self.rank == dst else ()
        facts = (("tensor", tensor), ("op", op), ("dst", dst))
        return self._launch(
            Operation("reduce", reductions.reduce, (tensor,), outputs, (op, dst), facts), async_op
        )

    def reduce_scatter(
        self, output: Tensor, input_list: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce a list of W tensors over all ranks and keep the rank's own in ``output``.

        Args:
            output: As many elements as ``input_list[rank]``.
            input_list: Tensors of any sizes; the i-th has the same size on all ranks.
        """
        with self._checked("reduce_scatter") as where:
            arguments.tensor(where, output, "output")
            arguments.writable(where, output, "output")
            arguments.tensors(where, input_list, "input_list", self.size)
            arguments.same(where, (output, input_list[0]), "output and input_list")
            own, rule = input_list[self.rank], f"the number of input_list[{self.rank}]"
            arguments.numel(where, output, "output", own.numel(), rule)
            arguments.operation(where, output.dtype, op)
        execute, facts = reductions.reduce_scatter, (("tensors", input_list), ("op", op))
        return self._launch(
            Operation("reduce_scatter", execute, input_list, (output,), (op,), facts), async_op
        )

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce ``input`` (W·N elements) over all ranks; keep the rank's own N in ``output``."""
        return self.reduce_scatter_tensor_coalesced((output,), (input,), op, async_op)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None:
        """Execute ``reduce_scatter_tensor`` for each pair of two lists, as one operation."""
        name = "reduce_scatter_tensor"
        with self._checked(name) as where:
            arguments.pairs(where, outputs, inputs, output_factor=1, input_factor=self.size)
            for output in outputs:
                arguments.operation(where, output.dtype, op)
        execute, facts = reductions.reduce_scatter_tensor, (("tensors", outputs), ("op", op))
        return self._launch(Operation(name, execute, inputs, outputs, (op,), facts), async_op)

    def _all_reduce_sparse(self, tensor: Tensor, op: ReduceOp, async_op: bool) -> Work | None:
        with self._checked("all_reduce") as where:
            arguments.sparse(where, tensor, "tensor", op)
            arguments.writable(where, tensor, "tensor")
        # One operation, because other collectives of the group must not run between its stages.
        return self.in_order(
            partial(sparse.all_reduce, self, self._comm, where, tensor, op),
            async_op,
            tensor.device,
            operation="all_reduce",
            facts=sparse.facts(tensor, op),
            results=(tensor,),
        )
