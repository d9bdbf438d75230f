"""Collectives of a process group that move data, with torch.distributed's names and meanings.

Every call is collective over the group: all ranks call it in the same order, with arguments that
agree. A synchronous call returns when this rank's part has ended (for CUDA tensors: when MPI has
returned and the current stream waits for the results). With ``async_op=True`` a call returns a
``Work``, and the tensors belong to the operation until ``wait`` returns.

Wrong arguments raise ``ValueError`` or ``TypeError`` before MPI is called. In debug mode
(``MPIDIST_DEBUG=1``) arguments that disagree, or that are wrong on one rank only, raise
``DisagreementError`` on all ranks. MPI's failures raise ``RankFailureError`` or ``MpidistError``.

Letters: W ranks of the group; N elements of one contribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.comm.algorithms import movement, node_memory
from mpidist.comm.execution import arguments
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.execution.work import Work
from mpidist.comm.mpi import autograd_mode

Tensor = torch.Tensor


class Collectives(Execution):
    """The collective calls of a process group that move data; ``reductions`` has the others."""

    @property
    def allocates_node_memory(self) -> bool:
        """Return whether ``allocate`` returns memory that all other ranks can read."""
        made = node_memory.of(self._comm)
        return self.size > 1 and self.is_single_node and (made is None or made.is_shared)

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in memory that the other ranks of the node reach without messages.

        In a group of one node ``all_gather_into_tensor`` copies straight from there, where every
        rank's output or input lies in it. The tensor is this rank's own, like any other, until it
        is registered in a ``Window``, through which ranks of the node write to it and map it. A
        process forked from the rank writes to the same memory.

        The memory serves this group's later tensors when nothing refers to the tensor any more, and
        is freed when the group is closed and its last tensor gone; a tensor may outlive the group.
        Where no two ranks share a node, and with one warning where the ranks cannot map each
        other's memory or this rank's part of it is full, the tensor is in plain memory.

        Collective: the first call, over the group, unless a window was made before; waits behind
        queued operations. Later calls concern this rank alone.

        Args:
            shape: Numbers of elements.
            dtype: The dtype.

        Returns:
            A contiguous tensor on the CPU with undefined values, at the start of a page.

        Raises:
            ValueError: A negative number of elements (this rank).
            TypeError: Not numbers, or not a dtype (this rank).
        """
        with self._checked("allocate") as where:
            sizes = arguments.shape(where, shape)
            arguments.dtype(where, dtype)
        memory = node_memory.of(self._comm)
        if memory is None and node_memory.has_neighbours(self._comm):
            memory = self._launch(
                Operation("allocate", node_memory.make, args=(self.where("allocate"),))
            )
        self._require_usable("allocate")
        if memory is None:
            with autograd_mode.allocating():
                return torch.empty(sizes, dtype=dtype, device="cpu")
        return memory.tensor(sizes, dtype)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copy rank ``src``'s tensor (any shape and dtype, equal on all ranks) to all."""
        return self._broadcast("broadcast", (tensor,), src, async_op)

    def broadcast_coalesced(
        self, tensors: Tensors, src: int, async_op: bool = False
    ) -> Work | None:
        """Copy rank ``src``'s list of tensors to all, as one operation."""
        with self._checked("broadcast_coalesced") as where:
            arguments.tensors(where, tensors, "tensors")
        return self._broadcast("broadcast_coalesced", tensors, src, async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Wait until all ranks have called ``barrier``."""
        return self._launch(Operation("barrier", movement.barrier), async_op)

    def all_gather(
        self, tensor_list: Tensors, tensor: Tensor, async_op: bool = False
    ) -> Work | None:
        """Gather each rank's ``tensor`` into a list of W tensors; sizes may differ by rank."""
        with self._checked("all_gather") as where:
            arguments.tensor(where, tensor, "tensor")
            arguments.tensors(where, tensor_list, "tensor_list", self.size)
            arguments.same(where, (tensor, tensor_list[0]), "tensor and tensor_list")
            own, name = tensor_list[self.rank], f"tensor_list[{self.rank}]"
            arguments.numel(where, own, name, tensor.numel(), "this rank's own tensor")
            for target in tensor_list:
                arguments.writable(where, target, "tensor_list")
        facts = (("tensors", tensor_list),)
        return self._launch(
            Operation("all_gather", movement.all_gather, (tensor,), tensor_list, (), facts),
            async_op,
        )

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, async_op: bool = False
    ) -> Work | None:
        """Gather each rank's ``input`` (N elements) into ``output`` (W·N elements, by rank)."""
        return self.all_gather_into_tensor_coalesced((output,), (input,), async_op)

    def all_gather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, async_op: bool = False
    ) -> Work | None:
        """Execute ``all_gather_into_tensor`` for each pair of two lists, as one operation."""
        name = "all_gather_into_tensor"
        with self._checked(name) as where:
            arguments.pairs(where, outputs, inputs, output_factor=self.size, input_factor=1)
        facts = (("tensors", inputs),)
        return self._launch(
            Operation(name, movement.all_gather_into, inputs, outputs, (), facts), async_op
        )

    def gather(
        self,
        tensor: Tensor,
        gather_list: Tensors | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Gather each rank's ``tensor`` (equal shapes) into rank ``dst``'s list of W tensors."""
        with self._checked("gather") as where:
            arguments.tensor(where, tensor, "tensor")
            arguments.rank(where, dst, "dst", self.size)
            if self.rank == dst:
                arguments.root_list(where, tensor, gather_list, "gather_list", self.size)
                for target in gather_list or ():
                    arguments.writable(where, target, "gather_list")
            else:
                arguments.no_list(where, gather_list, "gather_list", dst, self.rank)
        facts = (("tensor", tensor), ("dst", dst))
        return self._launch(
            Operation("gather", movement.gather, (tensor,), gather_list or (), (dst,), facts),
            async_op,
        )

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Tensors | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Copy the i-th of rank ``src``'s W tensors (equal shapes) to rank i's ``tensor``."""
        with self._checked("scatter") as where:
            arguments.tensor(where, tensor, "tensor")
            arguments.writable(where, tensor, "tensor")
            arguments.rank(where, src, "src", self.size)
            if self.rank == src:
                arguments.root_list(where, tensor, scatter_list, "scatter_list", self.size)
            else:
                arguments.no_list(where, scatter_list, "scatter_list", src, self.rank)
        facts = (("tensor", tensor), ("src", src))
        return self._launch(
            Operation("scatter", movement.scatter, scatter_list or (), (tensor,), (src,), facts),
            async_op,
        )

    def all_to_all(
        self, output_list: Tensors, input_list: Tensors, async_op: bool = False
    ) -> Work | None:
        """Send ``input_list[i]`` to rank i and receive its tensor in ``output_list[i]``.

        Sizes may differ.
        """
        with self._checked("all_to_all") as where:
            arguments.tensors(where, input_list, "input_list", self.size)
            arguments.tensors(where, output_list, "output_list", self.size)
            arguments.same(where, (input_list[0], output_list[0]), "input_list and output_list")
            sent, received = input_list[self.rank], output_list[self.rank]
            name, rule = f"output_list[{self.rank}]", "what the rank sends itself"
            arguments.numel(where, received, name, sent.numel(), rule)
            for target in output_list:
                arguments.writable(where, target, "output_list")
        execute, facts = movement.all_to_all, (("dtype", sent.dtype),)
        if self._debug:
            execute = movement.compared(
                execute, where, [t.numel() for t in input_list], [t.numel() for t in output_list]
            )
        return self._launch(
            Operation("all_to_all", execute, input_list, output_list, (), facts), async_op
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange rows of one tensor with each rank.

        Args:
            output: Receives ``output_split_sizes[i]`` rows from rank i.
            input: Rows of as many elements; ``input_split_sizes[i]`` of them are sent to rank i.
            output_split_sizes: W equal parts if None.
            input_split_sizes: W equal parts if None.
        """
        with self._checked("all_to_all_single") as where:
            arguments.tensor(where, output, "output")
            arguments.tensor(where, input, "input")
            arguments.same(where, (output, input), "output and input")
            arguments.writable(where, output, "output")
            sends = arguments.splits(where, input, input_split_sizes, "input", self.size)
            receives = arguments.splits(where, output, output_split_sizes, "output", self.size)
            row = arguments.row_numel(where, output, input, sends, receives, self.rank)
        row_bytes = row * input.element_size()
        args = ([n * row_bytes for n in sends], [n * row_bytes for n in receives])
        execute, facts = movement.all_to_all_single, (("dtype", input.dtype),)
        if self._debug:
            execute = movement.compared(execute, where, sends, receives)
        return self._launch(
            Operation("all_to_all_single", execute, (input,), (output,), args, facts), async_op
        )

    def _broadcast(self, name: str, tensors: Tensors, src: int, async_op: bool) -> Work | None:
        with self._checked(name) as where:
            for tensor in tensors:
                arguments.tensor(where, tensor, "tensor")
            arguments.rank(where, src, "src", self.size)
            if self.rank != src:
                for tensor in tensors:
                    arguments.writable(where, tensor, "tensor")
        inputs, outputs = (tensors, ()) if self.rank == src else ((), tensors)
        facts = (("tensors", tensors), ("src", src))
        return self._launch(
            Operation(name, movement.broadcast, inputs, outputs, (src,), facts), async_op
        )
