"""CUDA stream order of gradients between threads, by events on the producers' streams.

A gradient may arrive in one thread, be used by a node in another, and be read by an optimizer in a
third thread. Each thread has its own current streams, and torch's engine orders a pass only with
the streams of the thread that calls the engine.

Source: "CUDA semantics, stream semantics of backward passes",
pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mpidist.comm.memory.stream import Event, device_at, used_here

Tensor = torch.Tensor


class Fence:
    """Events after the last kernels that write some tensors, by device; none for host tensors."""

    __slots__ = ("_events",)

    def __init__(self, tensors: Iterable[Tensor | None] = ()) -> None:
        self._events: dict[torch.device, Event] = {}
        self.record(tensors)

    def record(self, tensors: Iterable[Tensor | None]) -> None:
        """Record events on the calling thread's current streams, which write the tensors.

        The caller must have called ``block_current_streams`` for events recorded before.
        """
        for tensor in tensors:
            if (
                tensor is not None
                and not tensor.is_cpu
                and (device := device_at(tensor.device)) is not None
            ):
                self._events[tensor.device] = device.record_current_stream()

    def block_current_streams(self, tensors: Iterable[Tensor | None] = ()) -> None:
        """Let the calling thread's current streams wait for the events.

        The memory of ``tensors`` is kept from reuse until these streams have read it.
        """
        if self._events:
            for event in self._events.values():
                event.block_current_stream()
            for tensor in tensors:
                if tensor is not None:
                    used_here(tensor)
