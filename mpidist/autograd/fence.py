"""Order of gradients between threads: events behind the work that makes them, on the streams current where they were made.

A gradient may arrive in one thread, be used by a node in another, and be read by an optimizer in a
third, each with current streams of its own. torch's engine orders a pass with the streams of the
thread that calls it alone.

Source: "CUDA semantics, stream semantics of backward passes",
pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mpidist.comm.memory.stream import Event, device_at, used_here

Tensor = torch.Tensor


class Fence:
    """The last place at which tensors were made, by device. Tensors of the host need none."""

    __slots__ = ("_events",)

    def __init__(self, tensors: Iterable[Tensor | None] = ()) -> None:
        self._events: dict[torch.device, Event] = {}
        self.record(tensors)

    def record(self, tensors: Iterable[Tensor | None]) -> None:
        """Note that the calling thread's current streams make tensors.

        What was noted before must be held in this thread.
        """
        for tensor in tensors:
            if (
                tensor is not None
                and not tensor.is_cpu
                and (device := device_at(tensor.device)) is not None
            ):
                self._events[tensor.device] = device.record_current_stream()

    def hold(self, tensors: Iterable[Tensor | None] = ()) -> None:
        """Have the calling thread's current streams wait until the tensors are there; keep ``tensors`` until those are done."""
        if self._events:
            for event in self._events.values():
                event.block_current_stream()
            for tensor in tensors:
                if tensor is not None:
                    used_here(tensor)
