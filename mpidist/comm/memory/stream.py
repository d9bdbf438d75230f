"""Streams, events and memory of a device, as the algorithms use them: CUDA's, and the host's.

On the host a stream runs work at once. The algorithms use the protocols ``Device``, ``Stream`` and
``Event`` only, so that tests can run them on a device that delays its work.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class Event(Protocol):
    """A point in a stream, after the work queued so far."""

    def synchronize(self) -> None:
        """Block the host until the work before the event is complete."""

    def block_current_stream(self) -> None:
        """Let the calling thread's current stream wait for the event; the host does not block."""


class Stream(Protocol):
    """A queue of work on the device, executed in order."""

    def do(self, function: Callable[[], object]) -> None:
        """Call ``function`` with this stream current; its tensor operations are queued here."""

    def run(self, function: Callable[[], object]) -> None:
        """Call ``function``; its tensor operations are queued, its host work runs at once."""

    def wait(self, event: Any) -> None:
        """Let work queued from now on wait for an event."""

    def record(self) -> Event:
        """Return an event after the work queued so far."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until the work queued so far is complete."""


class Device(Protocol):
    """A device: two streams for the library's own work, and memory."""

    @property
    def down(self) -> Any:
        """The stream for copies to the host and for arithmetic."""

    @property
    def up(self) -> Any:
        """The stream for copies to the device."""

    def as_current(self) -> AbstractContextManager[None]:
        """Return a context in which this is the calling thread's current device.

        Every MPI call on the device's memory needs it. MPI uses CUDA's driver interface in the
        context that is current in the calling thread; in another context Open MPI does not notice
        that a message is complete (open-mpi/ompi#13836). Work on ``down`` and ``up`` is queued in
        it as well, because ``torch.cuda.stream`` restores the previous device at its end, which
        creates a context there.
        """

    def record_current_stream(self) -> Event:
        """Return an event after the work queued so far on the calling thread's current stream."""

    def leave_default_stream(self) -> None:
        """Give the calling thread, one of the library's, a current stream of its own.

        Otherwise the user's work on the default stream would wait for the thread's callbacks.
        """

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory of ``numel`` elements for asynchronous copies (pinned)."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return device memory of ``numel`` elements for use on ``down``."""


class CudaEvent:
    """A CUDA event and its device; ``torch.cuda.Event.wait`` would use the current device."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self.device = device
        self.event = event

    def synchronize(self) -> None:
        """See Event.synchronize."""
        self.event.synchronize()

    def block_current_stream(self) -> None:
        """See Event.block_current_stream."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaStream:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def do(self, function: Callable[[], object]) -> None:
        """See Stream.do."""
        with torch.cuda.stream(self.stream):
            function()

    run = do

    def wait(self, event: CudaEvent) -> None:
        """See Stream.wait."""
        self.stream.wait_event(event.event)

    def record(self) -> CudaEvent:
        """See Stream.record."""
        return CudaEvent(self.device, self.stream.record_event())

    def keep(self, tensor: Tensor) -> None:
        """See Stream.keep."""
        tensor.record_stream(self.stream)


class CudaDevice:
    """A GPU; each thread has its own two streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Streams of their own, because a wait of one group must not delay another group.
        self._of_thread = threading.local()

    @property
    def down(self) -> CudaStream:
        """See Device.down."""
        return self._stream("down")

    @property
    def up(self) -> CudaStream:
        """See Device.up."""
        return self._stream("up")

    def _stream(self, name: str) -> CudaStream:
        held = getattr(self._of_thread, name, None)
        if held is None:
            held = CudaStream(self.device)
            setattr(self._of_thread, name, held)
        return held

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """See Device.as_current."""
        with torch.cuda.device(self.device):
            if not hasattr(self._of_thread, "is_bound"):
                # A new thread has no context until it calls the CUDA runtime, which torch need not
                # do for a device that is already current.
                self.down.record()
                self._of_thread.is_bound = True
            yield

    def record_current_stream(self) -> CudaEvent:
        """See Device.record_current_stream.

        Raises:
            RuntimeError: The stream is being captured into a CUDA graph, which cannot contain MPI.
        """
        # Without this context the query would create a context on the current device.
        with torch.cuda.device(self.device):
            is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing:
            raise RuntimeError(
                "MPI cannot be captured into a CUDA graph; call the collective outside of "
                "torch.cuda.graph()"
            )
        return CudaEvent(self.device, torch.cuda.current_stream(self.device).record_event())

    def leave_default_stream(self) -> None:
        """See Device.leave_default_stream."""
        if not hasattr(self._of_thread, "has_own"):
            self._of_thread.has_own = True
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See Device.staging; torch's allocator reuses pinned memory after the copies on it."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See Device.empty."""
        with torch.cuda.stream(self.down.stream):
            return torch.empty(numel, dtype=dtype, device=self.device)


def events_here(devices: Iterable[Device]) -> list[Event]:
    """Return events after the work queued so far on the calling thread's current streams.

    CUDA is not started: where it has not been used, there is no work.
    """
    return [
        device.record_current_stream()
        for device in devices
        if not isinstance(device, CudaDevice) or torch.cuda.is_initialized()
    ]


def used_here(tensor: Tensor) -> Tensor:
    """Return the tensor; its memory is kept until the calling thread's current stream is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


class HostEvent:
    """An event of the host, which is always complete."""

    def synchronize(self) -> None:
        """See Event.synchronize."""

    def block_current_stream(self) -> None:
        """See Event.block_current_stream."""


class HostStream:
    """A stream of the host, which runs work at once."""

    def do(self, function: Callable[[], object]) -> None:
        """See Stream.do."""
        function()

    run = do

    def wait(self, event: HostEvent) -> None:
        """See Stream.wait."""

    def record(self) -> HostEvent:
        """See Stream.record."""
        return HostEvent()

    def keep(self, tensor: Tensor) -> None:
        """See Stream.keep."""


class HostDevice:
    """The host as a device, to run the device algorithms on CPU tensors."""

    def __init__(self) -> None:
        self.down = self.up = HostStream()

    def as_current(self) -> AbstractContextManager[None]:
        """See Device.as_current."""
        return contextlib.nullcontext()

    def record_current_stream(self) -> HostEvent:
        """See Device.record_current_stream."""
        return HostEvent()

    def leave_default_stream(self) -> None:
        """See Device.leave_default_stream."""

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See Device.staging."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    empty = staging


def device_of(tensors: Iterable[Tensor]) -> Device | None:
    """Return the device of an operation's tensors, which are all on one; None for host memory."""
    for tensor in tensors:
        if tensor.is_cuda:
            return _cuda_device(tensor.device)
    return None


def device_at(device: torch.device | None) -> Device | None:
    """Return the device of a ``torch.device``; None for the host."""
    return None if device is None or device.type != "cuda" else _cuda_device(device)


@functools.cache
def _cuda_device(device: torch.device) -> CudaDevice:
    return CudaDevice(device)
