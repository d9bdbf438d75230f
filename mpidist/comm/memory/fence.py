"""Stream dependencies of one operation on device memory: its inputs' work, and its results."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from mpidist.comm.memory.stream import Device, Event


class StreamFence:
    """Records the issuer's stream; the executor waits for it, and records when results are ready.

    Made by the thread that issues the operation. MPI knows no streams, so the executing thread
    blocks the host (``synchronize``) before MPI touches device memory; nothing else blocks.

    Args:
        device: The device of the tensors.
        tensors: Inputs and outputs.
        ready: Event after which the tensors may be used; by default recorded now on the calling
            thread's current stream.
    """

    def __init__(
        self, device: Device, tensors: Sequence[torch.Tensor], ready: Event | None = None
    ) -> None:
        self.device = device
        self._tensors = tensors
        self._ready = device.record_current_stream() if ready is None else ready
        self._issuer = threading.get_ident()

    def is_issuing_thread(self) -> bool:
        """Return whether the calling thread issued the operation."""
        return threading.get_ident() == self._issuer

    def wait_ready(self) -> None:
        """Let ``down`` and ``up`` of the calling thread wait until the tensors may be used."""
        self.device.down.wait(self._ready)
        self.device.up.wait(self._ready)

    def wait_ready_on_current_stream(self) -> None:
        """Let the calling thread's current stream wait until the tensors may be used."""
        if not self.is_issuing_thread():
            self.device.leave_default_stream()
            self._ready.block_current_stream()

    def synchronize(self) -> None:
        """Block the host until the work queued on ``down`` is complete."""
        self.device.down.record().synchronize()

    def record(self) -> list[Event]:
        """Return the events after which the results may be used; keep the tensors until then."""
        for stream in {id(s): s for s in (self.device.down, self.device.up)}.values():
            for tensor in self._tensors:
                stream.keep(tensor)
        return [self.device.down.record(), self.device.up.record()]
