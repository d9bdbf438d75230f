"""Collectives of a process group as operations: arguments checked, executor, tensors, facts.

A function of each call of ``ProcessGroup`` takes the call's arguments, before MPI is called, and
returns the operation that the group executes or queues. Wrong arguments raise ``ValueError`` or
``TypeError``; in debug mode, ``DisagreementError`` on all ranks.

Letters: W ranks of the group; N elements of one contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm.algorithms import movement, reductions, sparse
from mpidist.comm.algorithms.reduce_op import ReduceOp
from mpidist.comm.execution import arguments
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.execution.work import Work

Tensor = torch.Tensor


def barrier(execution: Execution) -> Operation:
    """Return the operation of ``barrier``."""
    return Operation("barrier", movement.barrier)


def broadcast(
    execution: Execution, tensors: Tensors, src: int, name: str = "broadcast"
) -> Operation:
    """Return the operation of ``broadcast`` or ``broadcast_coalesced``."""
    state = execution.state
    with execution.checked(name) as where:
        for tensor in tensors:
            arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, src, "src", state.size)
        if state.rank != src:
            for tensor in tensors:
                arguments.writable(where, tensor, "tensor")
    inputs, outputs = (tensors, ()) if state.rank == src else ((), tensors)
    facts = (("tensors", tensors), ("src", src))
    return Operation(name, movement.broadcast, inputs, outputs, (src,), facts)


def broadcast_coalesced(execution: Execution, tensors: Tensors, src: int) -> Operation:
    """Return the operation of ``broadcast_coalesced``."""
    with execution.checked("broadcast_coalesced") as where:
        arguments.tensors(where, tensors, "tensors")
    return broadcast(execution, tensors, src, "broadcast_coalesced")


def all_gather(execution: Execution, tensor_list: Tensors, tensor: Tensor) -> Operation:
    """Return the operation of ``all_gather``."""
    state = execution.state
    with execution.checked("all_gather") as where:
        arguments.tensor(where, tensor, "tensor")
        arguments.tensors(where, tensor_list, "tensor_list", state.size)
        arguments.same(where, (tensor, tensor_list[0]), "tensor and tensor_list")
        own, name = tensor_list[state.rank], f"tensor_list[{state.rank}]"
        arguments.numel(where, own, name, tensor.numel(), "this rank's own tensor")
        for target in tensor_list:
            arguments.writable(where, target, "tensor_list")
    facts = (("tensors", tensor_list),)
    return Operation("all_gather", movement.all_gather, (tensor,), tensor_list, (), facts)


def all_gather_into_tensor(execution: Execution, outputs: Tensors, inputs: Tensors) -> Operation:
    """Return the operation of ``all_gather_into_tensor_coalesced``."""
    state = execution.state
    name = "all_gather_into_tensor"
    with execution.checked(name) as where:
        arguments.pairs(where, outputs, inputs, output_factor=state.size, input_factor=1)
    facts = (("tensors", inputs),)
    return Operation(name, movement.all_gather_into, inputs, outputs, (), facts)


def gather(
    execution: Execution, tensor: Tensor, gather_list: Tensors | None, dst: int
) -> Operation:
    """Return the operation of ``gather``."""
    state = execution.state
    with execution.checked("gather") as where:
        arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, dst, "dst", state.size)
        if state.rank == dst:
            arguments.root_list(where, tensor, gather_list, "gather_list", state.size)
            for target in gather_list or ():
                arguments.writable(where, target, "gather_list")
        else:
            arguments.no_list(where, gather_list, "gather_list", dst, state.rank)
    facts = (("tensor", tensor), ("dst", dst))
    return Operation("gather", movement.gather, (tensor,), gather_list or (), (dst,), facts)


def scatter(
    execution: Execution, tensor: Tensor, scatter_list: Tensors | None, src: int
) -> Operation:
    """Return the operation of ``scatter``."""
    state = execution.state
    with execution.checked("scatter") as where:
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        arguments.rank(where, src, "src", state.size)
        if state.rank == src:
            arguments.root_list(where, tensor, scatter_list, "scatter_list", state.size)
        else:
            arguments.no_list(where, scatter_list, "scatter_list", src, state.rank)
    facts = (("tensor", tensor), ("src", src))
    return Operation("scatter", movement.scatter, scatter_list or (), (tensor,), (src,), facts)


def all_to_all(execution: Execution, output_list: Tensors, input_list: Tensors) -> Operation:
    """Return the operation of ``all_to_all``."""
    state = execution.state
    with execution.checked("all_to_all") as where:
        arguments.tensors(where, input_list, "input_list", state.size)
        arguments.tensors(where, output_list, "output_list", state.size)
        arguments.same(where, (input_list[0], output_list[0]), "input_list and output_list")
        sent, received = input_list[state.rank], output_list[state.rank]
        name, rule = f"output_list[{state.rank}]", "what the rank sends itself"
        arguments.numel(where, received, name, sent.numel(), rule)
        for target in output_list:
            arguments.writable(where, target, "output_list")
    execute, facts = movement.all_to_all, (("dtype", sent.dtype),)
    if execution.is_debug:
        execute = movement.compared(
            execute, where, [t.numel() for t in input_list], [t.numel() for t in output_list]
        )
    return Operation("all_to_all", execute, input_list, output_list, (), facts)


def all_to_all_single(
    execution: Execution,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> Operation:
    """Return the operation of ``all_to_all_single``."""
    state = execution.state
    with execution.checked("all_to_all_single") as where:
        arguments.tensor(where, output, "output")
        arguments.tensor(where, input, "input")
        arguments.same(where, (output, input), "output and input")
        arguments.writable(where, output, "output")
        sends = arguments.splits(where, input, input_split_sizes, "input", state.size)
        receives = arguments.splits(where, output, output_split_sizes, "output", state.size)
        row = arguments.row_numel(where, output, input, sends, receives, state.rank)
    row_bytes = row * input.element_size()
    args = ([n * row_bytes for n in sends], [n * row_bytes for n in receives])
    execute, facts = movement.all_to_all_single, (("dtype", input.dtype),)
    if execution.is_debug:
        execute = movement.compared(execute, where, sends, receives)
    return Operation("all_to_all_single", execute, (input,), (output,), args, facts)


def all_reduce(execution: Execution, tensor: Tensor, op: ReduceOp) -> Operation:
    """Return the operation of ``all_reduce``."""
    with execution.checked("all_reduce") as where:
        arguments.tensor(where, tensor, "tensor")
        arguments.writable(where, tensor, "tensor")
        arguments.operation(where, tensor.dtype, op)
    both, facts = (tensor,), (("tensor", tensor), ("op", op))
    return Operation("all_reduce", reductions.all_reduce, both, both, (op,), facts)


def all_reduce_coalesced(execution: Execution, tensors: Tensors, op: ReduceOp) -> Operation:
    """Return the operation of ``all_reduce_coalesced``."""
    name = "all_reduce_coalesced"
    with execution.checked(name) as where:
        arguments.tensors(where, tensors, "tensors")
        for tensor in tensors:
            arguments.writable(where, tensor, "tensors")
        arguments.operation(where, tensors[0].dtype, op)
    facts = (("tensors", tensors), ("op", op))
    return Operation(name, reductions.all_reduce_flat, tensors, tensors, (op,), facts)


def reduce(execution: Execution, tensor: Tensor, dst: int, op: ReduceOp) -> Operation:
    """Return the operation of ``reduce``."""
    state = execution.state
    with execution.checked("reduce") as where:
        arguments.tensor(where, tensor, "tensor")
        arguments.rank(where, dst, "dst", state.size)
        arguments.operation(where, tensor.dtype, op)
        if state.rank == dst:
            arguments.writable(where, tensor, "tensor")
    outputs = (tensor,) if state.rank == dst else ()
    facts = (("tensor", tensor), ("op", op), ("dst", dst))
    return Operation("reduce", reductions.reduce, (tensor,), outputs, (op, dst), facts)


def reduce_scatter(
    execution: Execution, output: Tensor, input_list: Tensors, op: ReduceOp
) -> Operation:
    """Return the operation of ``reduce_scatter``."""
    state = execution.state
    with execution.checked("reduce_scatter") as where:
        arguments.tensor(where, output, "output")
        arguments.writable(where, output, "output")
        arguments.tensors(where, input_list, "input_list", state.size)
        arguments.same(where, (output, input_list[0]), "output and input_list")
        own, rule = input_list[state.rank], f"the number of input_list[{state.rank}]"
        arguments.numel(where, output, "output", own.numel(), rule)
        arguments.operation(where, output.dtype, op)
    execute, facts = reductions.reduce_scatter, (("tensors", input_list), ("op", op))
    return Operation("reduce_scatter", execute, input_list, (output,), (op,), facts)


def reduce_scatter_tensor(
    execution: Execution, outputs: Tensors, inputs: Tensors, op: ReduceOp
) -> Operation:
    """Return the operation of ``reduce_scatter_tensor_coalesced``."""
    state = execution.state
    name = "reduce_scatter_tensor"
    with execution.checked(name) as where:
        arguments.pairs(where, outputs, inputs, output_factor=1, input_factor=state.size)
        for output in outputs:
            arguments.operation(where, output.dtype, op)
    execute, facts = reductions.reduce_scatter_tensor, (("tensors", outputs), ("op", op))
    return Operation(name, execute, inputs, outputs, (op,), facts)


def all_reduce_sparse(
    execution: Execution, group: Any, tensor: Tensor, op: ReduceOp, async_op: bool
) -> Work | None:
    """Execute ``all_reduce`` of a sparse tensor, whose stages are collectives of the group.

    Args:
        group: The group itself.
    """
    with execution.checked("all_reduce") as where:
        arguments.sparse(where, tensor, "tensor", op)
        arguments.writable(where, tensor, "tensor")
    # One operation, because other collectives of the group must not run between its stages.
    work: Work | None = execution.in_order(
        partial(sparse.all_reduce, group, execution.state.comm, where, tensor, op),
        async_op,
        tensor.device,
        "all_reduce",
        sparse.facts(tensor, op),
        (tensor,),
    )
    return work
