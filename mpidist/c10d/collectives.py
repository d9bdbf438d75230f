"""Collectives and messages of a native group under torch's method names and option objects.

torch's groups and Backends have the same methods. Both of ours inherit them from here: a group for
callers in Python, a Backend for callers in C++. Every method translates its arguments and calls the
native group, whose methods have the documentation. ``short_forms`` translates torch's overloads.

Source: torch/csrc/distributed/c10d/Backend.hpp, Types.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import ReduceOp, Work

from mpidist.c10d.calls import Calls
from mpidist.c10d.reductions import Options, Reducing, operation_of, requested_operation
from mpidist.c10d.short_forms import full
from mpidist.c10d.work import ENDED, WorkList
from mpidist.comm.algorithms import reduce_op
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced

Tensor = torch.Tensor
TensorList: TypeAlias = "Sequence[torch.Tensor]"

_SUM = ReduceOp.SUM


@untraced
class Collectives:
    """torch's methods of collectives and messages over a native group.

    Attributes:
        native: The native group.
        calls: Its calls in torch's three forms.
    """

    native: ProcessGroup
    calls: Calls

    # --- reductions ---

    def allreduce(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See all_reduce."""
        if opts.__class__ is not c10d.AllreduceOptions:
            (tensors,), opts = full("allreduce", (tensors,), opts, rest, named)
        calls = self.calls
        requested = opts.reduceOp
        op = reduce_op.SUM if requested == _SUM else operation_of(requested)
        if len(tensors) > 1:
            return calls.call(
                self.native.all_reduce_coalesced, tensors, opts, detached(tensors), op
            )
        tensor = tensors[0]
        # Read once: the options are an object of C++, and each read costs 0.1 us.
        if not opts.asyncOp:
            if calls.all_reduce_at_once(tensor, op):
                return ENDED
            return calls.call(self.native.all_reduce, tensors, opts, untracked(tensor), op)
        if tensor.requires_grad:
            tensor = untracked(tensor)
        native: Any = self.native.all_reduce(tensor, op, async_op=True)
        work = calls.started(native, tensors)
        if tensor.numel() == 1:
            calls.flags.append(work)
        return work

    def allreduce_coalesced(self, tensors: TensorList, opts: Reducing | None = None) -> Work:
        """See all_reduce_coalesced."""
        method, op = self.native.all_reduce_coalesced, requested_operation(opts)
        return self.calls.call(method, tensors, opts, detached(tensors), op)

    def reduce(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See reduce."""
        if opts.__class__ is not c10d.ReduceOptions:
            (tensors,), opts = full("reduce", (tensors,), opts, rest, named)
        method, op = self.native.reduce, requested_operation(opts)
        return self.calls.call(method, tensors, opts, detached(tensors)[0], opts.rootRank, op)

    def reduce_scatter(
        self,
        outputs: TensorList,
        inputs: Sequence[TensorList],
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See reduce_scatter."""
        if opts.__class__ is not c10d.ReduceScatterOptions:
            (outputs, inputs), opts = full("reduce_scatter", (outputs, inputs), opts, rest, named)
        (output,), (parts,) = detached(outputs), inputs
        method, op = self.native.reduce_scatter, requested_operation(opts)
        return self.calls.call(method, outputs, opts, output, detached(parts), op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Reducing | None = None
    ) -> Work:
        """See reduce_scatter_tensor."""
        return Collectives.reduce_scatter_single_coalesced(self, [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Reducing | None = None
    ) -> Work:
        """See reduce_scatter_tensor_coalesced."""
        method, op = self.native.reduce_scatter_tensor_coalesced, requested_operation(opts)
        return self.calls.call(method, outputs, opts, detached(outputs), detached(inputs), op)

    # --- movement ---

    def broadcast(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See broadcast."""
        if opts.__class__ is not c10d.BroadcastOptions:
            (tensors,), opts = full("broadcast", (tensors,), opts, rest, named)
        root = opts.rootRank
        if len(tensors) == 1:
            return self.calls.call(self.native.broadcast, tensors, opts, detached(tensors)[0], root)
        return self.calls.call(
            self.native.broadcast_coalesced, tensors, opts, detached(tensors), root
        )

    def allgather(
        self,
        outputs: Sequence[TensorList],
        inputs: TensorList,
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See all_gather."""
        if opts.__class__ is not c10d.AllgatherOptions:
            (outputs, inputs), opts = full("allgather", (outputs, inputs), opts, rest, named)
        (targets,), (source,) = outputs, detached(inputs)
        return self.calls.call(self.native.all_gather, outputs, opts, detached(targets), source)

    def allgather_coalesced(
        self, outputs: Sequence[TensorList], inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_gather; one list of outputs for each rank, one tensor of it for each input."""
        works: list[Any] = [
            self.native.all_gather(detached([row[place] for row in outputs]), source, async_op=True)
            for place, source in enumerate(detached(inputs))
        ]
        return self.calls.hand_out(WorkList(works), outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options | None = None) -> Work:
        """See all_gather_into_tensor."""
        return Collectives.all_gather_single_coalesced(self, [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_gather_into_tensor_coalesced."""
        method = self.native.all_gather_into_tensor_coalesced
        return self.calls.call(method, outputs, opts, detached(outputs), detached(inputs))

    def gather(
        self,
        outputs: Sequence[TensorList],
        inputs: TensorList,
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See gather."""
        if opts.__class__ is not c10d.GatherOptions:
            (outputs, inputs), opts = full("gather", (outputs, inputs), opts, rest, named)
        root = opts.rootRank
        targets = detached(outputs[0]) if self.native.rank == root else None
        return self.calls.call(
            self.native.gather, outputs, opts, detached(inputs)[0], targets, root
        )

    def scatter(
        self,
        outputs: TensorList,
        inputs: Sequence[TensorList],
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See scatter."""
        if opts.__class__ is not c10d.ScatterOptions:
            (outputs, inputs), opts = full("scatter", (outputs, inputs), opts, rest, named)
        root = opts.rootRank
        sources = detached(inputs[0]) if self.native.rank == root else None
        return self.calls.call(
            self.native.scatter, outputs, opts, detached(outputs)[0], sources, root
        )

    def alltoall(
        self, outputs: TensorList, inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_to_all."""
        return self.calls.call(
            self.native.all_to_all, outputs, opts, detached(outputs), detached(inputs)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
        **named: Any,
    ) -> Work:
        """See all_to_all_single."""
        if opts.__class__ is not c10d.AllToAllOptions:
            _, opts = full("all_to_all_single", (), opts, (), named)
        (target, source), method = detached([output, input]), self.native.all_to_all_single
        return self.calls.call(method, [output], opts, target, source, output_sizes, input_sizes)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """See barrier; the wait applies a timeout in the options."""
        if opts.__class__ is not c10d.BarrierOptions:
            _, opts = full("barrier", (), timeout if opts is None else opts)
        return self.calls.call(self.native.barrier, [], opts)

    # --- messages ---

    def send(self, tensors: TensorList, dst: int, tag: int = 0) -> Work:
        """See isend."""
        tensor = tensors[0]
        if tensor.requires_grad:
            tensor = untracked(tensor)
        return self.calls.sent(self.native.isend(tensor, dst, tag), tensors)

    def recv(self, tensors: TensorList, src: int, tag: int = 0) -> Work:
        """See irecv."""
        tensor = tensors[0]
        if tensor.requires_grad:
            tensor = untracked(tensor)
        return self.calls.started(self.native.irecv(tensor, src, tag), tensors)

    def recv_anysource(self, tensors: TensorList, tag: int = 0) -> Work:
        """See irecv."""
        return self.calls.started(self.native.irecv(untracked(tensors[0]), None, tag), tensors)


# torch has an operator for each method.
OPERATORS = tuple(name for name in vars(Collectives) if not name.startswith("_"))


def detached(tensors: TensorList) -> list[Tensor]:
    """Return tensors that the native calls may write to, for tensors that require gradients."""
    return [untracked(tensor) for tensor in tensors]


def untracked(tensor: Tensor) -> Tensor:
    """Return a tensor that the native calls may write to; the same unless it requires gradients."""
    # torch's own backends write to tensors that require grad without recording, and scripts rely on
    # this; the native calls refuse leaves. A detached sparse tensor has its own indices and values,
    # so results would not reach the caller's tensor.
    return tensor.detach() if tensor.requires_grad and not tensor.is_sparse else tensor
