"""``torch.distributed.ProcessGroup`` on MPI, with a ``Backend`` of ours registered on it.

Callers in Python reach the methods of ``TorchProcessGroup``, and with them the native group, in one
step. Callers in C++ reach its ``MpiBackend`` (``torch.ops.c10d``), or these methods again by way of
torch's trampoline (DDP's reducer, functional collectives). While a ``TorchDispatchMode`` is active
or the group has hooks, a method calls torch's own method of its name, which calls the operator,
which calls the Backend: modes (``CommDebugMode``, ``FakeTensorMode``) and hooks (``NanCheckHook``)
see the call. Decision 0018 has the latencies.

pybind11 does not call an override again from within that override. It knows it by the name and the
first argument of the innermost Python frame, so torch's method is called in a frame of the
override's name, never in a function that overrides share.

Source: torch/csrc/distributed/c10d/py/PyProcessGroup.hpp.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store, Work

from mpidist.c10d.calls import Answer, Calls
from mpidist.c10d.collectives import OPERATORS, Collectives, TensorList
from mpidist.c10d.management import GroupManagement
from mpidist.c10d.mpi_backend import MpiBackend
from mpidist.c10d.short_forms import full, in_full
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced

Tensor = torch.Tensor

DEVICES = ("cpu", "cuda")
_TorchGroup: Any = dist.ProcessGroup
# Number of active modes of this thread.
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Attached by torch itself, in C++, to every group that it creates.
_NAN_CHECK = "TORCH_DIST_NAN_CHECK"

# The shortest calls, and one with arguments that torch's method takes otherwise.
_WRITTEN_OUT = ("all_to_all_single", "allreduce", "recv", "send")


def _always() -> int:
    return 1


def _observing(name: str) -> Callable[[TorchProcessGroup, int, Callable[..., None]], None]:
    """Return a method of torch's that registers a hook, which sees every call from then on."""

    def register(self: TorchProcessGroup, hook_id: int, hook: Callable[..., None]) -> None:
        self.observe()
        getattr(_TorchGroup, name)(self, hook_id, hook)

    return register


@untraced
class TorchProcessGroup(Collectives, GroupManagement, dist.ProcessGroup):
    """A ``torch.distributed.ProcessGroup`` on MPI.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.

    Attributes:
        native: The native group, whose methods torch's API partly lacks.
        backend: The ``Backend`` of its devices.
    """

    def __init__(self, native: ProcessGroup, store: Store, name: str) -> None:
        super().__init__(store, native.rank, native.size)
        self.native = native
        self.calls = Calls(native)
        self.backend = MpiBackend(self.calls)
        self._is_observed = _always if os.environ.get(_NAN_CHECK) == "1" else _modes
        self._register(dict.fromkeys(DEVICES, self.backend))
        _TorchGroup._set_group_name(self, name)

    def _register(self, backends: dict[str, Any]) -> None:
        """Register a Backend for each device type, the last one also as the default."""
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device, backend in backends.items():
            self._register_backend(torch.device(device), kind, backend)

    def observe(self) -> None:
        """Make every call from here on an operator call, which hooks of the group see."""
        self._is_observed = _always

    register_pre_hook = _observing("register_pre_hook")
    register_post_hook = _observing("register_post_hook")

    # --- collectives and messages: those of _WRITTEN_OUT ---

    def allreduce(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See all_reduce."""
        if opts.__class__ is not distributed_c10d.AllreduceOptions:
            (tensors,), opts = full("allreduce", (tensors,), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.allreduce(self, tensors, opts))
        return Collectives.allreduce(self, tensors, opts)

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
        if opts.__class__ is not distributed_c10d.AllToAllOptions:
            _, opts = full("all_to_all_single", (), opts, (), named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(
                    _TorchGroup.all_to_all_single(
                        self, output, input, output_sizes or [], input_sizes or [], opts
                    )
                )
        return Collectives.all_to_all_single(self, output, input, output_sizes, input_sizes, opts)

    def send(self, tensors: TensorList, dst: int, tag: int = 0) -> Work:
        """See isend."""
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.send(self, tensors, dst, tag))
        return Collectives.send(self, tensors, dst, tag)

    def recv(self, tensors: TensorList, src: int, tag: int = 0) -> Work:
        """See irecv."""
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.recv(self, tensors, src, tag))
        return Collectives.recv(self, tensors, src, tag)

    # --- torch's coalescing manager ---

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin a batch; torch's C++ calls it by this name."""
        self.calls.begin_batch()

    def end_coalescing(self, device: torch.device | None = None) -> Work:
        """End the batch, and return one work for its calls."""
        return self.calls.end_batch()

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing


def _observed(name: str) -> Callable[..., Work]:
    """Return a method that calls the operator while the group is observed."""
    method, torchs = getattr(Collectives, name), getattr(_TorchGroup, name)

    def call(self: TorchProcessGroup, *args: Any, **named: Any) -> Any:
        if self._is_observed():
            # Options that were left out have torch's defaults.
            given = [one for one in in_full(name, args, named) if one is not None]
            with Answer() as answer:
                return answer.to(torchs(self, *given))
        return method(self, *args, **named)

    # By this name pybind11 knows the frame of an override.
    call.__code__ = call.__code__.replace(co_name=name)
    return untraced(functools.wraps(method)(call))


for _name in OPERATORS:
    # torch before 2.13 has other names; no group is of this class there.
    if _name not in _WRITTEN_OUT and hasattr(_TorchGroup, _name):
        setattr(TorchProcessGroup, _name, _observed(_name))
