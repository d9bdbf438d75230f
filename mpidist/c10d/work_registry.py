"""Entries of works in torch's registry, where ``wait_tensor`` finds them by their tensors.

Within ``allow_inflight_collective_as_graph_input_ctx`` torch registers every work for its output
tensors, in methods of C++ that calls from Python to a group of ours do not pass. The registry hands
out all works of a storage at once and cannot drop a single one, so an entry that is handed out
while another work leaves the registry is registered again.

Source: torch/csrc/distributed/c10d/ProcessGroup.hpp and ProcessGroup.cpp.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from mpidist.dynamo import untraced

_c10d: Any = importlib.import_module("torch._C._distributed_c10d")
_here = threading.local()  # .leaves: a work of this thread leaves the registry

is_used = _c10d._allow_inflight_collective_as_graph_input


@untraced
class _Entry(Work):
    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work, self._tensor = work, tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not getattr(_here, "leaves", False):
            return self._work.wait()
        if not self._work.is_completed():
            _c10d._register_work(self._tensor, self)
        return True


def enter(work: Work, result: object) -> list[torch.Tensor]:
    """Register a work for the tensors of its result; return these, for ``leave``."""
    tensors = list(_stored(result))
    for tensor in tensors:
        _c10d._register_work(tensor, _Entry(work, tensor))
    return tensors


def leave(tensors: list[torch.Tensor]) -> None:
    """Drop a work that has ended from the entries of its tensors."""
    _here.leaves = True
    try:
        for tensor in tensors:
            torch.ops._c10d_functional.wait_tensor(tensor)
    finally:
        _here.leaves = False


def _stored(result: object) -> Iterator[torch.Tensor]:
    # The registry knows tensors by their storage, which sparse tensors lack.
    if isinstance(result, torch.Tensor):
        if result.layout is torch.strided:
            yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _stored(part)
