"""A device as comm sees it: queues of work (streams), marks in them (events), and memory.

The host is the simplest device: what is queued is done at once. The algorithms know ``Device``,
``Stream`` and ``Event`` alone, so that their order can be tested on a device of the tests that
delays its work.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Block the host until the work before it has ended."""

    def block_current_stream(self) -> None:
        """Let the calling thread's current stream wait for it; the host goes on."""


class Stream(Protocol):
    """A queue of work on the device."""

    def do(self, function: Callable[[], Any]) -> None:
        """Queue what ``function`` does with tensors."""

    def run(self, function: Callable[[], Any]) -> None:
        """Do at once what ``function`` does on the host, and queue what it does with tensors."""

    def wait(self, event: Any) -> None:
        """Let what is queued from now on wait for an event."""

    def record(self) -> Event:
        """Return the place behind what has been queued so far."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from other uses until what has been queued so far has ended."""


class Device(Protocol):
    """Where tensors live that the CPU cannot, or should not, touch."""

    @property
    def down(self) -> Any:
        """The stream for copies to the host, and for arithmetic."""

    @property
    def up(self) -> Any:
        """The stream for copies to the device."""

    def as_current(self) -> Any:
        """Return a context in which it is the calling thread's current device: every call of MPI on its memory is in one.

        MPI works by CUDA's driver interface, in the context that is current in the calling thread;
        in another one Open MPI does not notice that a message has ended (open-mpi/ompi#13836). What
        is queued on ``down`` and ``up`` is queued in it as well: ``torch.cuda.stream`` sets the
        device from before at its end, which gives that one a context.
        """

    def record_current_stream(self) -> Event:
        """Return the place behind what the calling thread's current stream has been given so far."""

    def leave_default_stream(self) -> None:
        """Give the calling thread, one of ours, a current stream of its own: the user's work must not wait for its callbacks."""

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory that copies reach without the CPU."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return device memory for use on ``down``."""


class CudaEvent:
    """An event of CUDA; ``torch.cuda.Event.wait`` would take the current device's stream, whichever that is."""

    def __init__(self, device: torch.device, event: Any) -> None:
        self.device = device
        self.event = event

    def synchronize(self) -> None:
        """See Event.synchronize."""
        self.event.synchronize()

    def block_current_stream(self) -> None:
        """See Event.block_current_stream."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaStream:
    """A stream of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def do(self, function: Callable[[], Any]) -> None:
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
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_thread = threading.local()  # what one group waits for is not to hold up another's

    @property
    def down(self) -> CudaStream:
        """See Device.down; one for each thread."""
        return self._stream("down")

    @property
    def up(self) -> CudaStream:
        """See Device.up; one for each thread."""
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
                # A thread begins on device 0, and without a context until it calls the CUDA
                # runtime, which torch need not do for the device that is current already.
                self.down.record()
                self._of_thread.is_bound = True
            yield

    def record_current_stream(self) -> CudaEvent:
        """See Device.record_current_stream.

        Raises:
            RuntimeError: The stream is being captured into a CUDA graph, which MPI cannot be part
                of.
        """
        # or the current device would be asked, and be given a context to answer
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
        """See Device.staging; torch keeps pinned memory for later calls, and knows which copies are under way."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See Device.empty."""
        with torch.cuda.stream(self.down.stream):
            return torch.empty(numel, dtype=dtype, device=self.device)


def used_here(tensor: Tensor) -> Tensor:
    """Keep a tensor's memory until what the calling thread's current stream has been given has ended; return the tensor."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


class HostEvent:
    """A place in a queue that is always empty."""

    def synchronize(self) -> None:
        """See Event.synchronize."""

    def block_current_stream(self) -> None:
        """See Event.block_current_stream."""


class HostStream:
    """A queue whose work is done at once."""

    def do(self, function: Callable[[], Any]) -> None:
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
    """The host as a device: for the algorithms on CPU tensors."""

    def __init__(self) -> None:
        self.down = self.up = HostStream()

    def as_current(self) -> Any:
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
    """Return the device of an operation's tensors, all on one; None if MPI can be given their memory without asking."""
    for tensor in tensors:
        if tensor.is_cuda:
            return _cuda_device(tensor.device)
    return None


def device_at(device: torch.device | None) -> Device | None:
    """Return the device of a name, or None for the host."""
    return None if device is None or device.type != "cuda" else _cuda_device(device)


@functools.cache
def _cuda_device(device: torch.device) -> CudaDevice:
    return CudaDevice(device)
