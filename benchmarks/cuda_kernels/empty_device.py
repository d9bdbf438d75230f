"""CUDA device without a GPU: CPU tensors that pass for CUDA tensors, empty streams and kernels.

The code for CUDA tensors runs without device work, so that only the host's part remains. Python
objects of similar cost replace torch's CUDA calls, and count them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from mpidist.comm.execution import execution
from mpidist.comm.memory import stream
from mpidist.ddp import module
from mpidist.ddp.buckets import layout
from mpidist.ddp.hooks import powersgd as hooks
from mpidist.kernels import accumulate, launch, load, pack, powersgd

_of_thread = threading.local()


class _Event:
    """Event that is always complete."""

    counts: Counter[str]

    def synchronize(self) -> None:
        self.counts["waits of the host"] += 1


class _Stream:
    """Stream, which is also a context manager, as in ``torch.cuda.stream``."""

    counts: Counter[str]
    cuda_stream = 1
    device = torch.device("cpu")

    def __init__(self, device: torch.device | None = None) -> None:
        self._before: list[_Stream] = []

    def record_event(self) -> _Event:
        self.counts["events"] += 1
        return _Event()

    def wait_event(self, event: _Event) -> None:
        self.counts["waits of a stream"] += 1

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> None:
        self._before.append(_current())
        _set_current(self)

    def __exit__(self, *error: object) -> None:
        _set_current(self._before.pop())


class _Device(stream.CudaDevice):
    """Device whose staging memory needs no pinning."""

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)


def _current(device: torch.device | None = None) -> _Stream:
    stream_of_thread = getattr(_of_thread, "stream", None)
    if stream_of_thread is None:
        stream_of_thread = _of_thread.stream = _Stream()
    return stream_of_thread


def _set_current(stream: _Stream) -> None:
    _of_thread.stream = stream


@contextmanager
def in_place_of_cuda() -> Iterator[Counter[str]]:
    """Let fp32 tensors pass for CUDA tensors; yield the counts of kernels, events and waits.

    Tensors of other dtypes remain host tensors, for example the tables that ranks compare.
    """
    counts: Counter[str] = Counter()
    _Event.counts = _Stream.counts = counts
    fake = _Device(torch.device("cpu"))

    def kernel(*args: Any, **kwargs: Any) -> None:
        counts["kernels"] += 1

    replaced: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "is_cuda", property(lambda tensor: tensor.dtype is torch.float32)),
        (torch.Tensor, "is_cpu", property(lambda tensor: tensor.dtype is not torch.float32)),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "stream", lambda stream: stream),
        (torch.cuda, "current_stream", _current),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: _current().cuda_stream),
        (torch.cuda, "set_stream", _set_current),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_device", lambda: None),  # index of the host's device
        (torch.cuda, "device", lambda device: nullcontext()),
        (execution, "device_at", lambda device: None if device is None else fake),
        (stream, "_cuda_device", lambda device: fake),
        (layout, "share", lambda group, nbytes: None),
        (load, "function", lambda *args: kernel),
        (hooks, "_largest", lambda flat: flat.new_zeros(())),
        *(
            (user, "has_kernels", lambda tensor: True)
            for user in (accumulate, pack, powersgd, module)
        ),
        *((user, "stream_of", lambda device: _current().cuda_stream) for user in (launch, pack)),
    ]
    patches = [mock.patch.object(*one, create=True) for one in replaced]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in reversed(patches):
            patch.stop()
