"""Dispatch of collectives as ``torch.ops.c10d`` operators, visible to ``TorchDispatchMode``.

torch calls the methods of a Python group directly. Calls to torch's own backends go through the
dispatcher as ``torch.ops.c10d`` operators (for example ``c10d.allreduce_``), which active modes
intercept (``CommDebugMode``, ``FakeTensorMode``, ``MemTracker``, ...). While a mode is active, a
call to a group of mpidist is made as this operator. The modes run one after the other; then a
kernel of this module calls the group's method with the tensors that the modes have passed on.

The kernel has the dispatch key ``BackendSelect``, the only key between the modes and the device
kernels. It redispatches all other calls: those on a group of another backend or with fake tensors.
The first call under a mode registers the kernel, because from then on the kernel adds tens of
microseconds to calls of other backends. Without a mode, a call only reads the number of modes.

Source: schemas in torch/csrc/distributed/c10d/Ops.cpp.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import Work

from mpidist.c10d.reductions import Options, Rooted, RootedTensor

Arguments = Callable[..., tuple[object, ...]]

# Number of active modes of this thread. Each method calls this in its first line, because a wrapper
# around the method would take 0.2 us.
modes = torch._C._len_torch_dispatch_stack

_here = threading.local()  # .call: this thread's operator call


class Boxable(Protocol):
    """A group that operators take as their argument."""

    def boxed(self) -> object:
        """Return the group as torch's C++ object."""


class _Call:
    """A running call of a group's method as an operator.

    Attributes:
        work: The method's work, once the method has run. torch's C++ handle alone would not keep
            the Python object alive.
    """

    def __init__(self, group: Boxable, method: str, rest: tuple[object, ...]) -> None:
        self.group = group
        self.work: Work | None = None
        self._method = method
        self._rest = rest  # non-tensor arguments

    def run(self, tensors: tuple[object, ...]) -> Work:
        self.work = getattr(self.group, self._method)(*tensors, *self._rest)
        return self.work


def dispatched(method: str, group: Boxable, *args: object) -> Work:
    """Call a method of TorchProcessGroup as its operator, while a mode is active.

    Args:
        method: Name of the method.
        group: The group.
        args: Arguments of the method.

    Returns:
        The method's work, or torch's empty work if a mode replaced the call.
    """
    name, tensors, arguments = _OPERATORS[method]
    operator = getattr(torch.ops.c10d, name).default
    _register()
    before = getattr(_here, "call", None)
    call = _here.call = _Call(group, method, args[tensors:])
    # The dispatcher needs a tensor argument to find the kernel.
    given = args[:tensors] if tensors else (torch.empty(1, dtype=torch.uint8, device="cpu"),)
    # Operators of older versions lack asyncOp or the timeout.
    takes = len(operator._schema.arguments) - len(given) - 1
    try:
        result = operator(*given, group.boxed(), *arguments(*args[tensors:])[:takes])
    finally:
        _here.call = before
    if call.work is not None:
        return call.work
    return Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)


@functools.cache
def _register() -> torch.library.Library:
    library = torch.library.Library("c10d", "IMPL")
    for name, tensors, _ in _OPERATORS.values():
        operator = getattr(torch.ops.c10d, name).default
        library.impl(
            name, functools.partial(_kernel, operator, tensors), "BackendSelect", with_keyset=True
        )
    return library


def _kernel(
    operator: torch._ops.OpOverload, tensors: int, keys: torch._C.DispatchKeySet, *args: Any
) -> object:
    call = getattr(_here, "call", None)
    place = max(tensors, 1)
    if (
        call is None
        or keys.has(torch._C.DispatchKey.Meta)
        or torch.distributed.ProcessGroup.unbox(args[place]) is not call.group
    ):
        return operator.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *args)
    _here.call = None
    work = call.run(args[:tensors]).boxed()
    return (args[0], work) if len(operator._schema.returns) == 2 else work


def _run(opts: Options | None) -> tuple[bool, int]:
    """Return an option object's ``asyncOp`` and timeout in ms, which most operators end with."""
    if opts is None:
        return True, -1
    return opts.asyncOp, round(opts.timeout.total_seconds() * 1000)


def _reduction() -> object:
    # A placeholder: Python can neither read nor write torch's boxed ReduceOp, and the method's own
    # argument holds the reduction.
    return torch.classes.c10d.ReduceOp()


def _plain(opts: Options | None = None) -> tuple[object, ...]:
    return _run(opts)


def _without_timeout(opts: Options | None = None) -> tuple[object, ...]:
    return _run(opts)[:1]


def _reducing(opts: Options | None = None) -> tuple[object, ...]:
    return _reduction(), *_run(opts)


def _all_reducing(opts: Options | None = None) -> tuple[object, ...]:
    return _reduction(), None, *_run(opts)


def _rooted(opts: Rooted) -> tuple[object, ...]:
    return opts.rootRank, *_run(opts)


def _broadcasting(opts: RootedTensor) -> tuple[object, ...]:
    return opts.rootRank, opts.rootTensor, *_run(opts)


def _reducing_to_root(opts: RootedTensor) -> tuple[object, ...]:
    return _reduction(), opts.rootRank, opts.rootTensor, *_run(opts)


def _splitting(
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
    opts: Options | None = None,
) -> tuple[object, ...]:
    return list(output_sizes or ()), list(input_sizes or ()), *_run(opts)


def _synchronizing(opts: Options | None = None) -> tuple[object, ...]:
    return list(getattr(opts, "device_ids", None) or ()), *_run(opts)


def _addressed(peer: int, tag: int = 0) -> tuple[object, ...]:
    return peer, tag


def _tagged(tag: int = 0) -> tuple[object, ...]:
    return (tag,)


# By method of ``Collectives``: operator, number of leading tensor arguments, and the function that
# makes the operator's arguments after the tensors and the group.
_OPERATORS: dict[str, tuple[str, int, Arguments]] = {
    "allreduce": ("allreduce_", 1, _all_reducing),
    "allreduce_coalesced": ("allreduce_coalesced_", 1, _reducing),
    "reduce": ("reduce_", 1, _reducing_to_root),
    "reduce_scatter": ("reduce_scatter_", 2, _reducing),
    "reduce_scatter_single": ("_reduce_scatter_base_", 2, _reducing),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", 2, _reducing),
    "broadcast": ("broadcast_", 1, _broadcasting),
    "allgather": ("allgather_", 2, _plain),
    "allgather_coalesced": ("allgather_coalesced_", 2, _without_timeout),
    "all_gather_single": ("_allgather_base_", 2, _plain),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced_", 2, _without_timeout),
    "gather": ("gather_", 2, _rooted),
    "scatter": ("scatter_", 2, _rooted),
    "alltoall": ("alltoall_", 2, _plain),
    "all_to_all_single": ("alltoall_base_", 2, _splitting),
    "barrier": ("barrier", 0, _synchronizing),
    "send": ("send", 1, _addressed),
    "recv": ("recv_", 1, _addressed),
    "recv_anysource": ("recv_any_source_", 1, _tagged),
}
