"""Process group with one backend per device type: MPI for some, Gloo or NCCL for the others.

For a list such as ``"cpu:mpidist,cuda:nccl"`` torch uses the ProcessGroup of the first plugin that
returns one for the whole list. This group has all backends of the list registered on itself, where
callers in C++ find them. A call from Python goes to the backend of its tensors' device; calls
without tensors go to MPI, unless they name a device.

The other backends are registered on a second ProcessGroup, of torch's class, too, and called there:
the base method of a Python group runs torch's operator without releasing the GIL, which Gloo's
thread needs to release a tensor while it holds the lock of its queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, Work

from mpidist.c10d import generation
from mpidist.c10d.collectives import OPERATORS
from mpidist.c10d.names import OURS
from mpidist.c10d.routing import route
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced

_TorchGroup: Any = dist.ProcessGroup
_TorchProcessGroup: Any = generation.group_class()


@untraced
class MixedProcessGroup(_TorchProcessGroup):
    """A torch group on MPI for some device types, and on other backends for the rest.

    mpidist's own modules (``mpidist.ddp``, ``mpidist.optim``, ``mpidist.rpc``) use ``native``, that
    is MPI for every device.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.
        backends: Backend names by device type; at least one is mpidist and one is not.
        others: torch's BackendType and Backend by the names of the other backends.
    """

    def __init__(
        self,
        native: ProcessGroup,
        store: Store,
        name: str,
        backends: Mapping[str, str],
        others: Mapping[str, tuple[Any, Any]],
    ) -> None:
        self._names, self._others = dict(backends), dict(others)
        super().__init__(native, store, name)
        held: Any = _TorchGroup(store, native.rank, native.size)
        for device, backend in backends.items():
            if backend != OURS:
                held._register_backend(torch.device(device), *others[backend])
        # Gloo's only if there is no other.
        held._set_default_backend(others[min(others, key="gloo".__eq__)][0])
        held._set_group_name(name)
        self._held: Any = held

    def _register(self, backends: dict[str, Any]) -> None:
        self.backend.supports_shrinking = False  # the other backends would keep all ranks
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(custom)
        for device, name in self._names.items():
            kind, backend = self._others.get(name, (custom, self.backend))
            self._register_backend(torch.device(device), kind, backend)

    def _get_backend(self, device: torch.device) -> Any:
        # torch catches RuntimeError: it requests CUDA's backend on any machine.
        if torch.device(device).type not in self._names:
            raise RuntimeError(
                f'group "{self.group_name}" has backends for {self._backend_list()} alone; '
                f"got device {device}"
            )
        return super()._get_backend(device)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """See barrier; waits in the backend of the options' device, or in MPI without a device."""
        # Reading an unset device raises in some versions of torch.
        device = getattr(opts, "device", None)
        if device is None or self._names.get(device.type, OURS) == OURS:
            work: Work = super().barrier(opts, timeout)
            return work
        return self._torch_group().barrier(opts)

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin a batch in the backend of a device."""
        if device is None or self._is_ours(device.type):
            super().start_coalescing()
        else:
            self._torch_group()._start_coalescing(device)

    def end_coalescing(self, device: torch.device | None = None) -> Work:
        """End the batch, and return one work for its calls."""
        if device is None or self._is_ours(device.type):
            work: Work = super().end_coalescing()
            return work
        return self._torch_group()._end_coalescing(device)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of all backends."""
        super().set_timeout(timeout)
        for _, backend in self._others.values():
            backend._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group on all backends."""
        if self._held is not None:
            self._held.shutdown()
            self._held = None
        super().shutdown()

    def abort(self) -> None:
        """Abort what is under way on all backends."""
        if self._held is not None:
            self._held.abort()
        super().abort()

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

    def _is_ours(self, device: str) -> bool:
        backend = self._names.get(device)
        if backend is None:
            listed = " and ".join(f"{kind} ({name})" for kind, name in self._names.items())
            raise TypeError(
                f"{self.native.where('a call')} got a tensor on {device}, but this group has "
                f"backends for {listed} alone"
                + (
                    ""
                    if device == "meta"
                    else "; name one where the group is made: "
                    f'"{self._backend_list()},{device}:gloo"'
                )
            )
        return backend == OURS

    def _backend_list(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self._names.items())

    def _torch_group(self) -> Any:
        if self._held is None:
            raise RuntimeError(f"{self.native.where('a call')} came after the group was closed")
        return self._held


# A barrier has no tensor.
route(MixedProcessGroup, _TorchProcessGroup, [name for name in OPERATORS if name != "barrier"])
