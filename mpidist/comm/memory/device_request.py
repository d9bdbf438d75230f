"""MPI requests on device memory: the device is current in the thread of each MPI call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mpidist.comm.memory.stream import Device

_UNCHANGED: AbstractContextManager[None] = contextlib.nullcontext()


def as_current(device: Device | None) -> AbstractContextManager[None]:
    """Return the context for MPI calls on a device's memory; None for host memory."""
    return _UNCHANGED if device is None else device.as_current()


class DeviceRequest:
    """An MPI request on device memory, which any thread may complete.

    Args:
        request: The request.
        device: Made current in the calling thread during each call.
    """

    __slots__ = ("_device", "_request")

    def __init__(self, request: Any, device: Device) -> None:
        self._request = request
        self._device = device

    def Test(self, status: Any = None) -> bool:
        """See MPI_Test."""
        with self._device.as_current():
            return bool(self._request.Test(status))

    def Wait(self, status: Any = None) -> Any:
        """See MPI_Wait."""
        with self._device.as_current():
            return self._request.Wait(status)

    def Cancel(self) -> None:
        """See MPI_Cancel."""
        with self._device.as_current():
            self._request.Cancel()


def start_request(device: Device | None, start: Callable[..., Any], *args: Any) -> Any:
    """Start a request by ``start(*args)`` on a device's memory, or on host memory for None."""
    if device is None:
        return start(*args)
    with device.as_current():
        return DeviceRequest(start(*args), device)
