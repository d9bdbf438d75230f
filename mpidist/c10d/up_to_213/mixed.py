"""Process group with one backend per device type: MPI for some, Gloo or NCCL for the others.

For a list such as ``"cpu:mpidist,cuda:nccl"`` torch uses the ProcessGroup of the first plugin that
returns one for the whole list. Therefore this group owns a second ProcessGroup, of torch's class,
with the other backends. Each call goes to the backend of its tensors' device. Calls without tensors
go to MPI, unless they name a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed.distributed_c10d import ProcessGroup as TorchGroup
from torch.distributed.distributed_c10d import Store, Work

from mpidist.c10d.names import OURS
from mpidist.c10d.routing import route
from mpidist.c10d.up_to_213 import batches
from mpidist.c10d.up_to_213.process_group import TorchProcessGroup
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced

# Methods with tensors, under all names of torch 2.11 to 2.13.
_ROUTED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
# Methods that torch calls on the default backend of its own groups.
_FORWARDED = (
    "_enable_collectives_timing",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_register_on_completion_hook",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
)


@untraced
class MixedProcessGroup(TorchProcessGroup):
    """A torch group on MPI for some device types, and on other backends for the rest.

    mpidist's own modules (``mpidist.ddp``, ``mpidist.optim``, ``mpidist.rpc``) use ``native``, that
    is MPI for every device.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.
        backends: Backend names by device type; at least one is mpidist and one is not.
        others: torch's BackendType and Backend by the names of the other backends. They are
            registered on a ProcessGroup of torch's class.
    """

    supports_shrinking = False  # the other backends would keep all ranks

    def __init__(
        self,
        native: ProcessGroup,
        store: Store,
        name: str,
        backends: Mapping[str, str],
        others: Mapping[str, tuple[Any, Any]],
    ) -> None:
        super().__init__(native, store, name)
        self._backends = dict(backends)
        held: Any = TorchGroup(store, native.rank, native.size)
        for device, backend in backends.items():
            if backend != OURS:
                held._register_backend(torch.device(device), *others[backend])
        held._set_default_backend(others["nccl" if "nccl" in others else "gloo"][0])
        held._set_group_name(name)
        if "nccl" in others:
            batches.install()
        self._others: TorchGroup | None = held

    @property
    def _device_types(self) -> list[torch.device]:
        """Supported devices."""
        return [torch.device(device) for device in self._backends]

    def _get_backend(self, device: torch.device) -> Any:
        # torch catches RuntimeError: it requests CUDA's backend on any machine.
        if torch.device(device).type not in self._backends:
            raise RuntimeError(
                f'group "{self._name}" has backends for {self._backend_list()} alone; '
                f"got device {device}"
            )
        if self._is_ours(torch.device(device).type):
            return super()._get_backend(device)
        return self._torch_group()._get_backend(device)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """See barrier; waits in the backend of the options' device, or in MPI without a device."""
        # Reading an unset device raises in some versions of torch.
        device = getattr(opts, "device", None)
        if device is None or self._backends.get(device.type, OURS) == OURS:
            return super().barrier(opts, timeout)
        return self._torch_group().barrier(opts)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of all backends."""
        super().set_timeout(timeout)
        for backend in self._other_backends():
            backend._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group on all backends."""
        if self._others is not None:
            self._others.shutdown()
            self._others = None
        super().shutdown()

    def abort(self) -> None:
        """Abort what is under way on all backends."""
        if self._others is not None:
            self._others.abort()
        super().abort()

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        if device is None or self._is_ours(device.type):
            super()._start_coalescing(device)
        else:
            self._torch_group()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        if device is None or self._is_ours(device.type):
            return super()._end_coalescing(device)
        return self._torch_group()._end_coalescing(device)

    def split_group(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, because the other backends cannot be split.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self.native.where('split_group')} cannot split a group shared by device "
            f"({self._backend_list()}); use "
            "torch.distributed.new_group"
        )

    def coalesces(self, device: torch.device) -> bool:
        """Return whether the messages of a batch on a device must be launched together."""
        return not self._is_ours(device.type) and bool(
            self._get_backend(device).supports_coalescing
        )

    def _is_ours(self, device: str) -> bool:
        backend = self._backends.get(device)
        if backend is None:
            listed = " and ".join(f"{kind} ({backend})" for kind, backend in self._backends.items())
            raise TypeError(
                f"{self.native.where('a call')} got a tensor on {device}, but this group has "
                f"backends for {listed} alone"
                + (
                    ""
                    if device == "meta"
                    else f"; name one where the group is made: "
                    f'"{self._backend_list()},{device}:gloo"'
                )
            )
        return backend == OURS

    def _backend_list(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self._backends.items())

    def _torch_group(self) -> TorchGroup:
        if self._others is None:
            raise RuntimeError(f"{self.native.where('a call')} came after the group was closed")
        return self._others

    def _other_backends(self) -> list[Any]:
        return [
            self._torch_group()._get_backend(torch.device(kind))
            for kind, name in self._backends.items()
            if name != OURS
        ]


def _forwarded(name: str) -> Callable[..., object]:
    @untraced
    def call(self: MixedProcessGroup, *args: object, **kwargs: object) -> object:
        return getattr(self._torch_group(), name)(*args, **kwargs)

    return call


route(MixedProcessGroup, TorchProcessGroup, _ROUTED)
for _name in _FORWARDED:
    setattr(MixedProcessGroup, _name, _forwarded(_name))
