"""The collectives of a process group, with torch.distributed's names and meanings.

All are collective over the group: every rank calls them, in the same order, with agreeing
arguments. A synchronous call returns when this rank's part has ended (for CUDA tensors: when MPI
has returned and the current stream waits for the results); with ``async_op=True`` it returns a
``Work`` at once, and the tensors belong to the operation until ``wait``. Wrong arguments raise
``ValueError`` or ``TypeError`` before MPI is entered; under ``MPIDIST_DEBUG=1`` a disagreement, or
an argument that is wrong on one rank only, raises ``DisagreementError`` on all ranks. MPI's
failures raise ``RankFailureError`` or ``MpidistError``.

Letters: W ranks of the group; N elements of one contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm import arguments
from mpidist.comm.algorithms import movement, reductions, sparse
from mpidist.comm.algorithms.reduce_op import SUM, Operation
from mpidist.comm.execution import Execution
from mpidist.comm.fast_path import Shortcut
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.work import Work

Tensor = torch.Tensor
TensorList = Sequence[torch.Tensor]


class Collectives(Execution):
    """The collective calls of a process group."""

    _told_operations = (
        "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_coalesced", "all_gather",
        "all_gather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor_coalesced",
        "all_to_all", "all_to_all_single",
    )  # fmt: skip

    def __init__(self, comm: Communicator, *args: Any, **kwargs: Any) -> None:
        super().__init__(comm, *args, **kwargs)
        self._shortcut = Shortcut(
            comm, self._progress, self.journal, self._explain, is_open=not self._debug
        )
        self.all_reduce_at_once = self._shortcut.all_reduce

    def _stop_shortest_path(self) -> None:
        self._shortcut.close()

    def all_reduce(
        self, tensor: Tensor, op: Operation = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce ``tensor`` (any shape, equal on all ranks) over all ranks, in place; the same bits everywhere.

        Sums and products of integers wrap around, and AVG divides the sum that has.

        A sparse COO tensor is reduced by SUM or AVG; ranks may hold different elements of it. It
        becomes a coalesced one.
        """
        if (
            not async_op
            and isinstance(tensor, Tensor)
            and not tensor.requires_grad
            and self.all_reduce_at_once(tensor, op)
        ):
            return None
        where = self.where("all_reduce")
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._all_reduce_sparse(where, tensor, op, async_op)
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        arguments.operation(where, tensor.dtype, op)
        both = (tensor,)
        return self._launch(
            "all_reduce",
            reductions.all_reduce,
            both,
            both,
            (op,),
            async_op,
            (("tensor", tensor), ("op", op)),
        )

    def all_reduce_coalesced(
        self, tensors: TensorList, op: Operation = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce each tensor of a list (one dtype, one device) over all ranks, in place, as one operation."""
        where = self.where("all_reduce_coalesced")
        arguments.tensors(where, tensors, "tensors")
        for tensor in tensors:
            arguments.writable(where, tensor, "tensors")
        arguments.operation(where, tensors[0].dtype, op)
        facts = (("tensors", tensors), ("op", op))
        execute = reductions.all_reduce_flat
        return self._launch(
            "all_reduce_coalesced", execute, tensors, tensors, (op,), async_op, facts
        )

    def reduce(
        self, tensor: Tensor, dst: int, op: Operation = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce ``tensor`` over all ranks into rank ``dst``'s; the others' keep their values."""
        where = self.where("reduce")
        arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, dst, "dst", self.size)
        arguments.operation(where, tensor.dtype, op)
        if self.rank == dst:
            arguments.writable(where, tensor, "tensor")
        outputs = (tensor,) if self.rank == dst else ()
        facts = (("tensor", tensor), ("op", op), ("dst", dst))
        return self._launch(
            "reduce", reductions.reduce, (tensor,), outputs, (op, dst), async_op, facts
        )

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Give rank ``src``'s tensor (any shape and dtype, equal on all ranks) to all."""
        return self._broadcast("broadcast", (tensor,), src, async_op)

    def broadcast_coalesced(
        self, tensors: TensorList, src: int, async_op: bool = False
    ) -> Work | None:
        """Give rank ``src``'s list of tensors to all."""
        arguments.tensors(self.where("broadcast_coalesced"), tensors, "tensors")
        return self._broadcast("broadcast_coalesced", tensors, src, async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Wait until all ranks have called it."""
        return self._launch("barrier", movement.barrier, (), (), (), async_op)

    def all_gather(
        self, tensor_list: TensorList, tensor: Tensor, async_op: bool = False
    ) -> Work | None:
        """Gather each rank's ``tensor`` into a list of W tensors on every rank; sizes may differ between ranks."""
        where = self.where("all_gather")
        arguments.tensor(where, tensor, "tensor")
        arguments.tensors(where, tensor_list, "tensor_list", self.size)
        arguments.same(where, (tensor, tensor_list[0]), "tensor and tensor_list")
        own = tensor_list[self.rank]
        arguments.numel(
            where, own, f"tensor_list[{self.rank}]", tensor.numel(), "this rank's own tensor"
        )
        for target in tensor_list:
            arguments.writable(where, target, "tensor_list")
        facts = (("tensors", tensor_list),)
        return self._launch(
            "all_gather", movement.all_gather, (tensor,), tensor_list, (), async_op, facts
        )

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, async_op: bool = False
    ) -> Work | None:
        """Gather each rank's ``input`` (N elements) into ``output`` (W·N elements, rank by rank)."""
        return self.all_gather_into_tensor_coalesced((output,), (input,), async_op)

    def all_gather_into_tensor_coalesced(
        self, outputs: TensorList, inputs: TensorList, async_op: bool = False
    ) -> Work | None:
        """Do ``all_gather_into_tensor`` for each pair of two lists, as one operation."""
        where = self.where("all_gather_into_tensor")
        self._check_pairs(where, outputs, inputs, output_factor=self.size, input_factor=1)
        execute = movement.all_gather_into
        return self._launch(
            "all_gather_into_tensor", execute, inputs, outputs, (), async_op, (("tensors", inputs),)
        )

    def gather(
        self,
        tensor: Tensor,
        gather_list: TensorList | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Gather each rank's ``tensor`` (equal shapes) into rank ``dst``'s list of W tensors."""
        where = self.where("gather")
        arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, dst, "dst", self.size)
        outputs = self._root_list(where, tensor, gather_list, "gather_list", dst)
        facts = (("tensor", tensor), ("dst", dst))
        return self._launch("gather", movement.gather, (tensor,), outputs, (dst,), async_op, facts)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: TensorList | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Give the i-th of rank ``src``'s W tensors (equal shapes) to rank i's ``tensor``."""
        where = self.where("scatter")
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        arguments.rank(where, src, "src", self.size)
        inputs = self._root_list(where, tensor, scatter_list, "scatter_list", src)
        facts = (("tensor", tensor), ("src", src))
        return self._launch("scatter", movement.scatter, inputs, (tensor,), (src,), async_op, facts)

    def reduce_scatter(
        self, output: Tensor, input_list: TensorList, op: Operation = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce a list of W tensors over all ranks and keep the rank's own in ``output``.

        Args:
            output: As many elements as ``input_list[rank]``.
            input_list: Tensors of any sizes; the i-th has the same size on all ranks.
        """
        where = self.where("reduce_scatter")
        arguments.tensor(where, output, "output")
        arguments.writable(where, output, "output")
        arguments.tensors(where, input_list, "input_list", self.size)
        arguments.same(where, (output, input_list[0]), "output and input_list")
        arguments.numel(
            where,
            output,
            "output",
            input_list[self.rank].numel(),
            f"the number of input_list[{self.rank}]",
        )
        arguments.operation(where, output.dtype, op)
        execute, facts = reductions.reduce_scatter, (("tensors", input_list), ("op", op))
        return self._launch(
            "reduce_scatter", execute, input_list, (output,), (op,), async_op, facts
        )

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Operation = SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce ``input`` (W·N elements) over all ranks and keep the rank's own N in ``output``."""
        return self.reduce_scatter_tensor_coalesced((output,), (input,), op, async_op)

    def reduce_scatter_tensor_coalesced(
        self, outputs: TensorList, inputs: TensorList, op: Operation = SUM, async_op: bool = False
    ) -> Work | None:
        """Do ``reduce_scatter_tensor`` for each pair of two lists, as one operation."""
        where = self.where("reduce_scatter_tensor")
        self._check_pairs(where, outputs, inputs, output_factor=1, input_factor=self.size)
        for output in outputs:
            arguments.operation(where, output.dtype, op)
        execute, facts = reductions.reduce_scatter_tensor, (("tensors", outputs), ("op", op))
        return self._launch(
            "reduce_scatter_tensor", execute, inputs, outputs, (op,), async_op, facts
        )

    def all_to_all(
        self, output_list: TensorList, input_list: TensorList, async_op: bool = False
    ) -> Work | None:
        """Send ``input_list[i]`` to rank i and receive ``output_list[i]`` from it; sizes may differ."""
        where = self.where("all_to_all")
        arguments.tensors(where, input_list, "input_list", self.size)
        arguments.tensors(where, output_list, "output_list", self.size)
        arguments.same(where, (input_list[0], output_list[0]), "input_list and output_list")
        own = input_list[self.rank]
        arguments.numel(
            where,
            output_list[self.rank],
            f"output_list[{self.rank}]",
            own.numel(),
            "what the rank sends itself",
        )
        for target in output_list:
            arguments.writable(where, target, "output_list")
        execute, facts = movement.all_to_all, (("dtype", own.dtype),)
        if self._debug:
            execute = movement.compared(
                execute, where, [t.numel() for t in input_list], [t.numel() for t in output_list]
            )
        return self._launch("all_to_all", execute, input_list, output_list, (), async_op, facts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send ``input_split_sizes[i]`` rows of ``input`` to rank i and receive ``output_split_sizes[i]`` rows from it.

        Sizes default to W equal parts. Rows of both tensors have the same number of elements.
        """
        where = self.where("all_to_all_single")
        for value, name in ((output, "output"), (input, "input")):
            arguments.tensor(where, value, name)
        arguments.same(where, (output, input), "output and input")
        arguments.writable(where, output, "output")
        sends = arguments.splits(where, input, input_split_sizes, "input", self.size)
        receives = arguments.splits(where, output, output_split_sizes, "output", self.size)
        row = input[0].numel() if sum(sends) else output[0].numel() if sum(receives) else 0
        if sum(sends) and sum(receives) and output[0].numel() != row:
            raise ValueError(
                f"{where} needs rows of one size; got input {tuple(input.shape)} and output "
                f"{tuple(output.shape)}"
            )
        if sends[self.rank] != receives[self.rank]:
            raise ValueError(
                f"{where} sends itself {sends[self.rank]} rows and expects {receives[self.rank]}; "
                "the two must be equal"
            )
        row_bytes = row * input.element_size()
        args = ([n * row_bytes for n in sends], [n * row_bytes for n in receives])
        execute = movement.all_to_all_single
        if self._debug:
            execute = movement.compared(execute, where, sends, receives)
        return self._launch(
            "all_to_all_single",
            execute,
            (input,),
            (output,),
            args,
            async_op,
            (("dtype", input.dtype),),
        )

    def _all_reduce_sparse(
        self, where: str, tensor: Tensor, op: Operation, async_op: bool
    ) -> Work | None:
        arguments.sparse(where, tensor, "tensor", op)
        arguments.writable(where, tensor, "tensor")
        # Several collectives, which no other operation of the group may come between.
        run = partial(sparse.all_reduce, self, self._comm, where, tensor, op)
        facts = sparse.facts(tensor, op)
        return self.in_order(
            run, async_op, tensor.device, operation="all_reduce", facts=facts, results=(tensor,)
        )

    def _broadcast(self, name: str, tensors: TensorList, src: int, async_op: bool) -> Work | None:
        where = self.where(name)
        for tensor in tensors:
            arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, src, "src", self.size)
        if self.rank == src:
            inputs, outputs = tensors, ()
        else:
            inputs, outputs = (), tensors  # type: ignore[assignment]
            for tensor in tensors:
                arguments.writable(where, tensor, "tensor")
        facts = (("tensors", tensors), ("src", src))
        return self._launch(name, movement.broadcast, inputs, outputs, (src,), async_op, facts)

    def _check_pairs(
        self,
        where: str,
        outputs: TensorList,
        inputs: TensorList,
        output_factor: int,
        input_factor: int,
    ) -> None:
        if (
            not isinstance(outputs, (list, tuple))
            or not isinstance(inputs, (list, tuple))
            or len(outputs) != len(inputs)
        ):
            raise ValueError(f"{where} needs as many outputs as inputs")
        for output, input in zip(outputs, inputs, strict=True):
            arguments.tensor(where, input, "input")
            arguments.tensor(where, output, "output")
            arguments.same(where, (output, input), "output and input")
            arguments.writable(where, output, "output")
            if output.numel() * input_factor != input.numel() * output_factor:
                rule = "W times the input" if output_factor > 1 else "the input over W"
                arguments.numel(
                    where, output, "output", input.numel() * output_factor // input_factor, rule
                )
                raise ValueError(
                    f"{where} needs an input whose elements divide by {input_factor}; got shape "
                    f"{tuple(input.shape)}"
                )

    def _root_list(
        self, where: str, tensor: Tensor, tensors: TensorList | None, name: str, root: int
    ) -> TensorList:
        if self.rank != root:
            if tensors:
                raise ValueError(
                    f"{where} takes {name} on rank {root} alone; got one on rank {self.rank}"
                )
            return ()
        arguments.tensors(where, tensors, name, self.size)
        assert tensors is not None
        arguments.same(where, (tensor, tensors[0]), f"tensor and {name}")
        for place, item in enumerate(tensors):
            arguments.numel(where, item, f"{name}[{place}]", tensor.numel(), "tensor's number")
            if name == "gather_list":
                arguments.writable(where, item, name)
        return tensors
