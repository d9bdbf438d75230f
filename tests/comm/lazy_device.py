"""Fake device whose streams run work at the latest or at random times.

After a missing wait, memory holds old values. The memory is the host's, so MPI can use it.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class WatchedComm:
    """Proxy of an MPI object: records for each call whether the device was current."""

    CALLS = frozenset({
        "Isend", "Irecv", "Sendrecv", "Bcast", "Allgather", "Allgatherv", "Alltoall", "Alltoallv",
        "Allreduce", "Test", "Wait",
        "Waitall", "Cancel",
    })  # fmt: skip

    def __init__(
        self, real: Any, device: LazyDevice, seen: list[tuple[str, bool]], watches_results: bool
    ) -> None:
        self._real, self._device, self._seen, self._watches_results = (
            real,
            device,
            seen,
            watches_results,
        )

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in self.CALLS and name != "Improbe":
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if name in self.CALLS:
                self._seen.append((name, self._device.is_current()))
            result = value(*args, **kwargs)
            is_object = result is not None and not isinstance(result, bool)
            return (
                WatchedComm(result, self._device, self._seen, True)
                if is_object and self._watches_results
                else result
            )

        return call


class LazyEvent:
    def __init__(self, device: LazyDevice, stream: LazyStream, place: int) -> None:
        self.device, self.stream, self.place = device, stream, place

    def synchronize(self) -> None:
        with self.device.lock:
            self.stream.run_to(self.place)

    def block_current_stream(self) -> None:
        self.device.current().wait(self)


class LazyStream:
    def __init__(self, device: LazyDevice) -> None:
        self.device = device
        self.queue: list[Callable[[], Any]] = []
        self.done = 0
        self.kept: dict[int, int] = {}  # by address: length of the queue
        device.streams.append(self)

    def do(self, function: Callable[[], Any]) -> None:
        if self in self.device.own and not self.device.is_current():
            self.device.strays.append(threading.current_thread().name)
        with self.device.lock:
            self.queue.append(function)
            self.device.drift()

    def run(self, function: Callable[[], Any]) -> None:
        with self.device.lock:
            self.run_to(len(self.queue))
        function()

    def wait(self, event: LazyEvent) -> None:
        self.do(event.synchronize)

    def record(self) -> LazyEvent:
        with self.device.lock:
            event = LazyEvent(self.device, self, len(self.queue))
            self.device.drift()
            return event

    def keep(self, tensor: torch.Tensor) -> None:
        # Host memory stays alive by its references; a test reads what torch's allocator would get.
        self.kept[tensor.data_ptr()] = len(self.queue)

    def run_to(self, place: int) -> None:
        while self.done < place:
            function = self.queue[self.done]
            self.done += 1
            function()


class LazyDevice:
    """A device; with ``seed`` None work runs at the latest time, with a number at random times."""

    def __init__(self, seed: int | None) -> None:
        self.lock = threading.RLock()
        self.streams: list[LazyStream] = []
        # Threads that queued work on ``down`` or ``up`` while another device was current.
        self.strays: list[str] = []
        self.own: list[LazyStream] = []
        self.down, self.up = LazyStream(self), LazyStream(self)
        self._of_thread = threading.local()
        self._default = LazyStream(self)
        self.own += [self.down, self.up]
        self._random = None if seed is None else random.Random(seed)

    def current(self) -> LazyStream:
        return getattr(self._of_thread, "stream", self._default)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        before = self.is_current()
        self._of_thread.is_current = True
        try:
            yield
        finally:
            self._of_thread.is_current = before

    def is_current(self) -> bool:
        """Return whether this is the calling thread's current device."""
        return getattr(self._of_thread, "is_current", False)

    def record_current_stream(self) -> LazyEvent:
        return self.current().record()

    def leave_default_stream(self) -> None:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = LazyStream(self)

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Random values: memory read before it is written must not hold the right values.
        return torch.randint(-100, 100, (numel * dtype.itemsize,), dtype=torch.int8).view(dtype)

    empty = staging

    def drift(self) -> None:
        """Run some work of randomly chosen streams."""
        if self._random is None:
            return
        for stream in self.streams:
            if self._random.random() < 0.3:
                stream.run_to(min(len(stream.queue), stream.done + self._random.randint(1, 3)))
