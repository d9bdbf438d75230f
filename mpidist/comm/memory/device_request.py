"""MPI requests on device memory: the device is current in the thread of each MPI call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from mpidist.comm.memory.stream import Device
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request

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

    def __init__(self, request: Request, device: Device) -> None:
        self._request = request
        self._device = device

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test."""
        with self._device.as_current():
            return bool(self._request.Test(status))

    def Wait(self, status: MPI.Status | None = None) -> object:
        """See MPI_Wait."""
        with self._device.as_current():
            return self._request.Wait(status)


def start_request(device: Device | None, start: Callable[..., Request], *args: object) -> Request:
    """Start a request by ``start(*args)`` on a device's memory, or on host memory for None."""
    if device is None:
        return start(*args)
    with device.as_current():
        return DeviceRequest(start(*args), device)
