"""Messages of CUDA tensors: by device pointer where this MPI can, else by a host copy.

Each side decides for itself, because MPI matches bytes. What lies in host memory in another order goes by a copy as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpidist.comm import buffer, capability
from mpidist.comm.buffer import Order
from mpidist.comm.stream import device_of

Tensor = torch.Tensor


def to_send(tensor: Tensor) -> Tensor:
    """Return memory that MPI may read: the tensor's own, or a copy that holds what it holds.

    Blocks: until the work that produces a tensor on a device has ended.
    """
    if buffer.is_direct(tensor):
        return tensor
    order = _entered(tensor)
    if order is not None and _takes_messages(tensor):
        order.begin()
        return tensor
    (host,), _ = buffer.HostCopies((tensor,), (), order).load()
    return host


def to_receive(tensor: Tensor) -> tuple[Tensor, Callable[[], list[Any]]]:
    """Return memory that MPI may write, and what to call when it has.

    That brings the message into the tensor, and returns the events behind which it is there.

    Blocks: until earlier work on a tensor on a device has ended.
    """
    if buffer.is_direct(tensor):
        return tensor, list
    order = _entered(tensor)
    if order is not None and _takes_messages(tensor):
        order.begin()
        return tensor, list
    copies = buffer.HostCopies((), (tensor,), order)
    _, (host,) = copies.load()

    def arrive() -> list[Any]:
        if order is not None:
            order.enter()  # whoever waits for a message need not be who started it
        copies.store()
        return order.leave() if order is not None else []

    return host, arrive


def _entered(tensor: Tensor) -> Order | None:
    device = device_of((tensor,))
    if device is None:
        return None
    order = Order(device, (tensor,))
    order.enter()
    return order


def _takes_messages(tensor: Tensor) -> bool:
    known = capability.known_operations(tensor.device)
    return known is not None and "point_to_point" in known and buffer.is_plain(tensor)
