"""Import of PyTorch's distributed_test, with the conditions of its tests as data.

The conditions are CUDA, the number of ranks, and torch's own reasons to skip. The module evaluates
them at import, from the environment. Here the decorators that would skip a test record the reason
on the function instead, and the test runs on any backend.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.testing._internal.common_distributed as common_distributed
import torch.testing._internal.common_utils as common_utils

_NAME = "torch.testing._internal.distributed.distributed_test"
_NOTES = "conformance_notes"
_SMALL, _ODD = "needs 3 ranks", "needs an even number of ranks"
_RANKS = re.compile(r"(exact )?world size of (\d+)")
_GPU = re.compile(r"(?i)nccl|cuda|gpu")
SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Needs:
    """Conditions of one test.

    Attributes:
        cuda: The test creates CUDA tensors.
        sizes: Possible numbers of ranks among 2, 3 and 4.
        skipped: Reason for which torch skips the test on this platform; empty if torch runs it.
        ddp: The test constructs a ``DistributedDataParallel``.
    """

    cuda: bool
    sizes: tuple[int, ...]
    skipped: str
    ddp: bool


def _noting(reason: str) -> Callable[[Any], Any]:
    def decorator(function: Any) -> Any:
        setattr(function, _NOTES, (*getattr(function, _NOTES, ()), reason))
        return function

    return decorator


def _noting_if(condition: bool, reason: str) -> Callable[[Any], Any]:
    return _noting(reason) if condition else lambda function: function


@functools.cache
def distributed_test() -> types.ModuleType:
    """Import the module."""
    # One rank: the decorators compare with this number and then report the number that they need.
    environment = mock.patch.dict(
        os.environ, {"BACKEND": "gloo", "WORLD_SIZE": "1", "INIT_METHOD": "file://"}
    )
    decorators = mock.patch.multiple(
        common_distributed,
        skip_if_no_gpu=_noting("needs a GPU"),
        skip_if_lt_x_gpu=lambda x, **_: _noting(f"needs {x} GPU"),
        skip_if_small_worldsize=_noting(_SMALL),
        skip_if_odd_worldsize=_noting(_ODD),
    )
    skips = mock.patch.multiple(
        common_utils, skip_but_pass_in_sandcastle=_noting, skip_but_pass_in_sandcastle_if=_noting_if
    )
    with environment, decorators, skips:
        return importlib.import_module(_NAME)


def names() -> list[str]:
    """Return the names of all tests, sorted."""
    base = distributed_test().DistributedTest._DistTestBase
    return sorted(
        name for name, _ in inspect.getmembers(base, inspect.isfunction) if name.startswith("test_")
    )


@functools.cache
def needs(name: str) -> Needs:
    """Return the conditions of a test."""
    base = distributed_test().DistributedTest._DistTestBase
    function = getattr(base, name)
    sizes, others = set(SIZES), []
    for reason in getattr(function, _NOTES, ()):
        if found := _RANKS.search(reason):
            wanted = int(found[2])
            sizes &= {wanted} if found[1] else {size for size in SIZES if size >= wanted}
        elif reason == _SMALL:
            sizes &= {3, 4}
        elif reason == _ODD:
            sizes &= {2, 4}
        else:
            others.append(reason)
    cuda = any(_GPU.search(reason) for reason in others)
    skipped = (
        function.__unittest_skip_why__ if getattr(function, "__unittest_skip__", False) else ""
    )
    skipped = skipped or next((reason for reason in others if reason == "no torchvision"), "")
    return Needs(cuda, tuple(sorted(sizes)), skipped, _constructs_ddp(base, function, set()))


def size_of(name: str) -> int:
    """Return the number of ranks of a test in the short form: one of its sizes, by a checksum."""
    sizes = needs(name).sizes
    return sizes[zlib.crc32(name.encode()) % len(sizes)]


def _constructs_ddp(base: Any, function: Any, seen: set[str]) -> bool:
    """Return whether a test, or a called method of its class, constructs DDP."""
    text = inspect.getsource(inspect.unwrap(function))
    if re.search(r"\bDistributedDataParallel\b", text):
        return True
    called = set(re.findall(r"\bself\.(_\w+)", text)) - seen
    seen |= called
    methods = [getattr(base, name, None) for name in sorted(called)]
    return any(
        _constructs_ddp(base, method, seen) for method in methods if inspect.isfunction(method)
    )
