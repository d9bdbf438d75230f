"""``torch.distributed.ProcessGroup`` on MPI: torch's method names and option objects.

Loaded when torch creates the first group. Every method translates its arguments and calls the
native group, whose methods have the documentation. torch calls the methods from Python and from
C++. Several methods have two names, because torch renamed them between 2.9 and 2.13.

Source: torch/csrc/distributed/c10d/PyProcessGroup.hpp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import ReduceOp, ReduceOptions, Store, Work

from mpidist.c10d import functional
from mpidist.c10d.dispatched import dispatched, modes
from mpidist.c10d.managed import ManagedGroup
from mpidist.c10d.reductions import Options, Reducing, Rooted, operation_of, requested_operation
from mpidist.c10d.work import ENDED, TorchReceive, TorchWork, WorkList
from mpidist.comm.algorithms import reduce_op
from mpidist.comm.algorithms.reduce_op import ReduceOp as NativeReduceOp
from mpidist.comm.group import ProcessGroup
from mpidist.comm.work import Work as NativeWork
from mpidist.dynamo import untraced

Tensor = torch.Tensor
TensorList = Sequence[torch.Tensor]

_SUM = ReduceOp.SUM
_FLAGS = 1024  # one-element works kept alive


@untraced
class TorchProcessGroup(ManagedGroup):
    """A ``torch.distributed.ProcessGroup`` on MPI."""

    def __init__(self, native: ProcessGroup, store: Store, name: str) -> None:
        super().__init__(native, store, name)
        self._fast_all_reduce = native.all_reduce_at_once
        self._batch: list[NativeWork | WorkList] | None = None
        # torch's reducer keeps the work of Join's one-element all-reduce in C++ until the first
        # gradient. Without a Python reference the Python half of the work would be freed, and C++
        # would wait in the base class without end.
        self._flags: deque[Work] = deque(maxlen=_FLAGS)

    # --- reductions ---

    def allreduce(self, tensors: TensorList, opts: Reducing | None = None) -> Work:
        """See all_reduce."""
        if modes():
            return dispatched("allreduce", self, tensors, opts)
        if opts is None:
            return self._call(self.native.all_reduce_coalesced, tensors, None, _detached(tensors))
        requested = opts.reduceOp
        op = reduce_op.SUM if requested == _SUM else operation_of(requested)
        if len(tensors) > 1:
            return self._call(
                self.native.all_reduce_coalesced, tensors, opts, _detached(tensors), op
            )
        if not opts.asyncOp and self._fast_all_reduce(tensors[0], op):
            return ENDED
        work = self._call(self.native.all_reduce, tensors, opts, _detached(tensors)[0], op)
        if opts.asyncOp and tensors[0].numel() == 1:
            self._flags.append(work)
        return work

    def allreduce_coalesced(self, tensors: TensorList, opts: Reducing | None = None) -> Work:
        """See all_reduce_coalesced."""
        if modes():
            return dispatched("allreduce_coalesced", self, tensors, opts)
        method, op = self.native.all_reduce_coalesced, requested_operation(opts)
        return self._call(method, tensors, opts, _detached(tensors), op)

    def reduce(self, tensors: TensorList, opts: ReduceOptions) -> Work:
        """See reduce."""
        if modes():
            return dispatched("reduce", self, tensors, opts)
        method, op = self.native.reduce, requested_operation(opts)
        return self._call(method, tensors, opts, _detached(tensors)[0], opts.rootRank, op)

    def reduce_scatter(
        self, outputs: TensorList, inputs: Sequence[TensorList], opts: Reducing | None = None
    ) -> Work:
        """See reduce_scatter."""
        if modes():
            return dispatched("reduce_scatter", self, outputs, inputs, opts)
        (output,), (parts,) = _detached(outputs), inputs
        method, op = self.native.reduce_scatter, requested_operation(opts)
        return self._call(method, outputs, opts, output, _detached(parts), op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Reducing | None = None
    ) -> Work:
        """See reduce_scatter_tensor."""
        if modes():
            return dispatched("reduce_scatter_single", self, output, input, opts)
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Reducing | None = None
    ) -> Work:
        """See reduce_scatter_tensor_coalesced."""
        if modes():
            return dispatched("reduce_scatter_single_coalesced", self, outputs, inputs, opts)
        method, op = self.native.reduce_scatter_tensor_coalesced, requested_operation(opts)
        return self._call(method, outputs, opts, _detached(outputs), _detached(inputs), op)

    # --- movement ---

    def broadcast(self, tensors: TensorList, opts: Rooted) -> Work:
        """See broadcast."""
        if modes():
            return dispatched("broadcast", self, tensors, opts)
        if len(tensors) == 1:
            return self._call(
                self.native.broadcast, tensors, opts, _detached(tensors)[0], opts.rootRank
            )
        return self._call(
            self.native.broadcast_coalesced, tensors, opts, _detached(tensors), opts.rootRank
        )

    def allgather(
        self, outputs: Sequence[TensorList], inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_gather."""
        if modes():
            return dispatched("allgather", self, outputs, inputs, opts)
        (targets,), (source,) = outputs, _detached(inputs)
        return self._call(self.native.all_gather, outputs, opts, _detached(targets), source)

    def allgather_coalesced(
        self, outputs: Sequence[TensorList], inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_gather; one list of outputs for each rank, one tensor of it for each input."""
        if modes():
            return dispatched("allgather_coalesced", self, outputs, inputs, opts)
        works: list[Any] = [
            self.native.all_gather(
                _detached([row[place] for row in outputs]), source, async_op=True
            )
            for place, source in enumerate(_detached(inputs))
        ]
        return self._hand_out(WorkList(works), outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options | None = None) -> Work:
        """See all_gather_into_tensor."""
        if modes():
            return dispatched("all_gather_single", self, output, input, opts)
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_gather_into_tensor_coalesced."""
        if modes():
            return dispatched("all_gather_single_coalesced", self, outputs, inputs, opts)
        method = self.native.all_gather_into_tensor_coalesced
        return self._call(method, outputs, opts, _detached(outputs), _detached(inputs))

    def gather(self, outputs: Sequence[TensorList], inputs: TensorList, opts: Rooted) -> Work:
        """See gather."""
        if modes():
            return dispatched("gather", self, outputs, inputs, opts)
        targets = _detached(outputs[0]) if self.native.rank == opts.rootRank else None
        return self._call(
            self.native.gather, outputs, opts, _detached(inputs)[0], targets, opts.rootRank
        )

    def scatter(self, outputs: TensorList, inputs: Sequence[TensorList], opts: Rooted) -> Work:
        """See scatter."""
        if modes():
            return dispatched("scatter", self, outputs, inputs, opts)
        sources = _detached(inputs[0]) if self.native.rank == opts.rootRank else None
        return self._call(
            self.native.scatter, outputs, opts, _detached(outputs)[0], sources, opts.rootRank
        )

    def alltoall(
        self, outputs: TensorList, inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_to_all."""
        if modes():
            return dispatched("alltoall", self, outputs, inputs, opts)
        return self._call(
            self.native.all_to_all, outputs, opts, _detached(outputs), _detached(inputs)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Options | None = None,
    ) -> Work:
        """See all_to_all_single."""
        if modes():
            return dispatched(
                "all_to_all_single", self, output, input, output_sizes, input_sizes, opts
            )
        (target, source), method = _detached([output, input]), self.native.all_to_all_single
        return self._call(method, [output], opts, target, source, output_sizes, input_sizes)

    def barrier(self, opts: Options | None = None) -> Work:
        """See barrier; the wait applies a timeout in the options."""
        if modes():
            return dispatched("barrier", self, opts)
        return self._call(self.native.barrier, [], opts)

    # Names before torch 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ---

    def send(self, tensors: TensorList, dst: int, tag: int = 0) -> Work:
        """See isend."""
        if modes():
            return dispatched("send", self, tensors, dst, tag)
        return TorchWork(self.native.isend(_detached(tensors)[0], dst, tag), tensors)

    def recv(self, tensors: TensorList, src: int, tag: int = 0) -> Work:
        """See irecv."""
        if modes():
            return dispatched("recv", self, tensors, src, tag)
        return TorchReceive(self.native.irecv(_detached(tensors)[0], src, tag), tensors)

    def recv_anysource(self, tensors: TensorList, tag: int = 0) -> Work:
        """See irecv."""
        if modes():
            return dispatched("recv_anysource", self, tensors, tag)
        return TorchReceive(self.native.irecv(_detached(tensors)[0], None, tag), tensors)

    # --- torch's coalescing manager ---

    # Without these two methods, every all_reduce after the manager would silently do nothing.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch, self._fast_all_reduce = [], _refuse

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        works, self._batch, self._fast_all_reduce = (
            self._batch or [],
            None,
            self.native.all_reduce_at_once,
        )
        return TorchWork(WorkList(works), [])

    def _call(
        self, method: Callable[..., Any], result: object, opts: Options | None, *args: object
    ) -> Work:
        if opts is not None and not opts.asyncOp and self._batch is None:
            method(*args)
            return ENDED
        return self._hand_out(method(*args, async_op=True), result, opts)

    def _hand_out(
        self, native: NativeWork | WorkList, result: object, opts: Options | None
    ) -> Work:
        if self._batch is not None:
            self._batch.append(native)
        elif opts is not None and not opts.asyncOp:
            native.wait()
            return ENDED
        return TorchWork(native, result)


def _refuse(tensor: Tensor, op: NativeReduceOp) -> bool:
    return False


def _detached(tensors: TensorList) -> list[Tensor]:
    # torch's own backends write to tensors that require grad without recording, and scripts rely on
    # this; the native calls refuse leaves. A detached sparse tensor has its own indices and values,
    # so results would not reach the caller's tensor.
    return [
        tensor.detach() if tensor.requires_grad and not tensor.is_sparse else tensor
        for tensor in tensors
    ]


functional.register()
