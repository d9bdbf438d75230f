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
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, Store, Work

from mpidist.c10d.calls import Calls
from mpidist.c10d.collectives import OPERATORS, Collectives, TensorList
from mpidist.c10d.management import GroupManagement
from mpidist.c10d.short_forms import full, in_full
from mpidist.c10d.up_to_213 import functional, overrides
from mpidist.c10d.up_to_213.device_backend import DeviceBackend
from mpidist.c10d.up_to_213.dispatched import dispatched, modes
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced

# Names before torch 2.12.
OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


@untraced
class TorchProcessGroup(Collectives, GroupManagement, dist.ProcessGroup):
    """A ``torch.distributed.ProcessGroup`` on MPI.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.

    Attributes:
        native: The native group, whose methods torch's API partly lacks.
        supports_shrinking: Whether ``shrink_group`` can leave ranks out.
    """

    supports_shrinking = True

    def __init__(self, native: ProcessGroup, store: Store, name: str) -> None:
        super().__init__(native.rank, native.size)  # type: ignore[call-arg]
        self.native = native
        self.calls = Calls(native)
        self._store, self._name = store, name

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

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin a batch."""
        self.calls.begin_batch()

    def end_coalescing(self, device: torch.device | None = None) -> Work:
        """End the batch, and return one work for its calls."""
        return self.calls.end_batch()

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # --- what torch 2.13 keeps in C++ of its own groups ---

    @property
    def pg_name(self) -> str:
        """Name of the group in torch."""
        return self._name

    @property
    def group_name(self) -> str:
        """Name of the group in torch; torch reads it after its own tables have dropped it."""
        return self._name

    def getGroupName(self) -> str:
        """See ProcessGroup.group_name; C++ uses this name."""
        return self._name

    def get_group_store(self) -> Store:
        """Return the store that torch created the group with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """Supported devices; ``dcp.async_save`` reads them."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> DeviceBackend:
        # Inductor requests CUDA's backend on machines without CUDA, too.
        if torch.device(device).type not in (held.type for held in self._device_types):
            raise RuntimeError(
                f'group "{self._name}": mpidist carries tensors of the CPU and of CUDA; got device '
                f"{device}"
            )
        return DeviceBackend(self)

    def coalesces(self, device: torch.device) -> bool:
        """Return whether the messages of a batch on a device must be launched together."""
        return False


def _dispatchable(name: str) -> Callable[..., Work]:
    method = getattr(Collectives, name)

    @untraced
    @functools.wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Work:
        if modes():
            return dispatched(name, self, *in_full(name, args, named))
        return method(self, *args, **named)

    return call


for _name in OPERATORS:
    if _name not in ("allreduce", "recv", "send"):
        setattr(TorchProcessGroup, _name, _dispatchable(_name))
for _old, _name in OLD_NAMES.items():
    setattr(TorchProcessGroup, _old, getattr(TorchProcessGroup, _name))

functional.register()
overrides.install()
