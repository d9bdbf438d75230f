"""Counts of operators on a device that need not exist: transfers, and launches by name.

Fake tensors have a device and no values, so that a machine without a GPU counts what CUDA would do.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)


class Transfers(TorchDispatchMode):
    """Counter of operators.

    Attributes:
        down: Operators that copy from a device to the host, each of which waits.
        up: Operators that copy from ordinary host memory to a device.
        launches: Operators on tensors of a device, by name; a list of tensors counts as one.
        copies: Operators that make a copy, on any device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down: list[str] = []
        self.up: list[str] = []
        self.launches: Counter[str] = Counter()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if name in ("_to_copy", "copy_", "clone"):
            self.copies.append(name)
        if name in ("_to_copy", "copy_"):
            source, target = (given[0], made[0]) if name == "_to_copy" else (given[1], given[0])
            if source.device.type != target.device.type:
                (self.down if target.device.type == "cpu" else self.up).append(name)
        elif name in ("_local_scalar_dense", "nonzero") and given[0].device.type != "cpu":
            self.down.append(name)
        is_launch = func.namespace != "prim" and not func.is_view
        if is_launch and any(tensor.device.type != "cpu" for tensor in (*given, *made)):
            self.launches[name] += 1
        return result


@contextmanager
def counted() -> Iterator[Transfers]:
    """Count the operators of a block, whose new tensors are fake."""
    with FakeTensorMode(allow_non_fake_inputs=True), Transfers() as counts:
        yield counts


@contextmanager
def waits() -> Iterator[list[str]]:
    """Collect a text for each wait of the host for a GPU that torch notices in a block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(each.message) for each in caught if "synchronizing" in str(each.message)]


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host waits for a GPU in a block, as far as torch notices."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
