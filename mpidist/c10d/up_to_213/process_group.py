"""``torch.distributed.ProcessGroup`` on MPI without a ``Backend``.

torch calls the methods from Python and from C++. Several methods have two names, because torch
renamed them between 2.11 and 2.13.

Source: torch/csrc/distributed/c10d/PyProcessGroup.hpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllreduceOptions, Store, Work

from mpidist.c10d.calls import Calls
from mpidist.c10d.collectives import Collectives, TensorList
from mpidist.c10d.short_forms import SHORT_FORMS, full
from mpidist.c10d.up_to_213 import functional
from mpidist.c10d.up_to_213.dispatched import OPERATORS, dispatched, modes
from mpidist.c10d.up_to_213.managed import ManagedGroup
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced


@untraced
class TorchProcessGroup(Collectives, ManagedGroup):
    """A ``torch.distributed.ProcessGroup`` on MPI.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.
    """

    def __init__(self, native: ProcessGroup, store: Store, name: str) -> None:
        super().__init__(native, store, name)
        self.calls = Calls(native)

    _is_observed = staticmethod(modes)

    # These three as the others below, without the wrapper.
    def allreduce(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See all_reduce."""
        if opts.__class__ is not AllreduceOptions:
            (tensors,), opts = full("allreduce", (tensors,), opts, rest, named)
        if modes():
            return dispatched("allreduce", self, tensors, opts)
        return Collectives.allreduce(self, tensors, opts)

    def send(self, tensors: TensorList, dst: int, tag: int = 0) -> Work:
        """See isend."""
        if modes():
            return dispatched("send", self, tensors, dst, tag)
        return Collectives.send(self, tensors, dst, tag)

    def recv(self, tensors: TensorList, src: int, tag: int = 0) -> Work:
        """See irecv."""
        if modes():
            return dispatched("recv", self, tensors, src, tag)
        return Collectives.recv(self, tensors, src, tag)

    # Without these two methods, every all_reduce after the manager would silently do nothing.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self.calls.begin_batch()

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        return self.calls.end_batch()


def _dispatchable(name: str) -> Callable[..., Work]:
    method = getattr(Collectives, name)

    @untraced
    @functools.wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Work:
        if modes():
            if name in SHORT_FORMS:
                count = OPERATORS[name][1]
                first = args[count] if len(args) > count else named.pop("opts", None)
                tensors, opts = full(name, args[:count], first, args[count + 1 :], named)
                return dispatched(name, self, *tensors, opts)
            # torch names an argument where it is the only one.
            return dispatched(name, self, *args, *named.values())
        return method(self, *args, **named)

    return call


for _name in OPERATORS:
    if _name not in ("allreduce", "recv", "send"):
        setattr(TorchProcessGroup, _name, _dispatchable(_name))
# Names before torch 2.12.
for _old, _name in (
    ("_allgather_base", "all_gather_single"),
    ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ("_reduce_scatter_base", "reduce_scatter_single"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ("alltoall_base", "all_to_all_single"),
):
    setattr(TorchProcessGroup, _old, getattr(TorchProcessGroup, _name))

functional.register()
