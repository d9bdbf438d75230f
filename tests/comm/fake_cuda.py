"""Fake of torch.cuda: a current device per thread, and a context per device from its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class FakeCuda:
    """CUDA devices that do not exist; ``log`` records the calls that have a cost."""

    def __init__(self, count: int = 4) -> None:
        self.count = count
        self.contexts: list[int] = []
        self.log: list[str] = []
        self.refuses = False
        self._of_thread = threading.local()

    @property
    def current(self) -> int:
        """The calling thread's current device."""
        return getattr(self._of_thread, "index", 0)

    def install(self, put: Callable[..., Any] = setattr) -> None:
        """Replace torch's functions; ``put`` is setattr, or monkeypatch.setattr(raising=False)."""
        cuda: Any = torch.cuda
        put(cuda, "is_available", lambda: bool(self._log("is_available") or self.count))
        put(cuda, "is_initialized", lambda: bool(self.contexts))
        put(cuda, "device_count", lambda: self.count)
        put(cuda, "current_device", lambda: self.current)
        put(cuda, "set_device", self.set_device)
        put(cuda, "synchronize", lambda device=None: None)
        put(cuda, "device", lambda device: _Selected(self, _index(device)))
        put(
            cuda,
            "Stream",
            lambda device: SimpleNamespace(record_event=lambda: self.use(_index(device))),
        )
        # A torch without CUDA lacks this function.
        put(torch._C, "_cuda_hasPrimaryContext", self.contexts.__contains__)
        put(torch, "zeros", lambda *shape, device: self.use(_index(device)))

    def set_device(self, device: Any) -> None:
        """See torch.cuda.set_device."""
        self._of_thread.index = _index(device)
        self.use(self.current)

    def select(self, index: int) -> None:
        """Make a device current without using it."""
        self._of_thread.index = index

    def use(self, index: int) -> None:
        """Use a device in the calling thread."""
        if self.refuses:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        if index not in self.contexts:
            self.contexts.append(index)
            self._log(f"context {index}")
        self._log(f"used {index} in {threading.current_thread().name}")

    def _log(self, text: str) -> None:
        self.log.append(text)


class _Selected:
    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self._cuda, self._index = cuda, index

    def __enter__(self) -> None:
        self._before = self._cuda.current
        self._cuda.select(self._index)

    def __exit__(self, *error: Any) -> None:
        self._cuda.select(self._before)


def _index(device: Any) -> int:
    return device if isinstance(device, int) else (device.index or 0)
