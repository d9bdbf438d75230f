"""Execution of a bucket's reduction: on the calling thread, or on the group's.

A hook of several stages starts its second collective when the first has ended, often in a future's
callback. If the group did not order them, one rank would start it before the next bucket's first
collective and another rank after it, and different collectives would meet. So the stages of one
bucket are one operation of the group (``ProcessGroup.in_order``): the calls of a hook return when
what they issued has ended, callbacks run where they are attached, and the next bucket waits.
Between nodes, and on CUDA, this happens on the group's thread and overlaps the backward pass. A
hook marked ``in_order`` keeps that order itself and is called on autograd's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mpidist.comm.group_protocol import Group
from mpidist.future import Future, completed

Hook = Callable[[Any, Any], Any]
H = TypeVar("H", bound=Hook)


def in_order(hook: H) -> H:
    """Mark a hook that starts all collectives before it returns, or as one ``group.in_order``."""
    hook.is_in_order = True  # type: ignore[attr-defined]
    return hook


def is_in_order(hook: Hook) -> bool:
    """Say whether a hook is marked ``in_order``."""
    return getattr(hook, "is_in_order", False)


def overlaps_backward(group: Group, tensor: torch.Tensor) -> bool:
    """Say whether a tensor is reduced on the group's thread during backward.

    On one node a transfer of host memory is processor time, which a thread cannot hide. Between
    nodes the processor waits for the network, and for a tensor on a device the host must go on to
    queue kernels. One rank alone transfers nothing.
    """
    return group.size > 1 and (tensor.is_cuda or not group.is_single_node)


def launch(
    group: Group,
    buffer: torch.Tensor,
    operation: Callable[[bool], Any],
    result: Callable[[], torch.Tensor] | None = None,
    waits_for_device: bool = False,
) -> Future[Any]:
    """Execute ``operation(async_op)``; return a future of the reduced buffer.

    Blocks: until the operation has ended, unless it ``overlaps_backward``.

    Args:
        operation: Returns a Work if ``async_op``, else None after the end.
        result: Returns the future's value; None for ``buffer``, or for the Work's own value.
        waits_for_device: The operation makes the host wait for the device, and therefore runs on
            the group's thread on a single rank, too.
    """
    work = operation(overlaps_backward(group, buffer) or (waits_for_device and buffer.is_cuda))
    if work is None:
        return completed(buffer if result is None else result())
    future = work.get_future()
    # ``value()`` raises the operation's exception.
    return future if result is None else future.then(lambda ended: (ended.value(), result())[1])


def run_stages(
    group: Group, buffer: torch.Tensor, stages: Callable[[], Any], waits_for_device: bool = False
) -> Future[torch.Tensor]:
    """Execute ``stages()``, which reduces ``buffer`` in place; see ``launch``."""

    def operation(async_op: bool) -> Any:
        if async_op:
            return group.in_order(stages, device=buffer.device)
        stages()
        return None

    return launch(group, buffer, operation, lambda: buffer, waits_for_device)


def call_hook(hook: Hook, state: Any, bucket: Any, group: Group) -> Future[torch.Tensor]:
    """Call ``hook(state, bucket)``; return a future of the reduced buffer.

    Blocks: until the bucket is reduced, unless it ``overlaps_backward``.

    Raises:
        TypeError: The hook returned no future of a tensor (raised by the future if it overlaps).
    """
    if is_in_order(hook):
        return hook(state, bucket)
    results: list[torch.Tensor] = []
    buffer = bucket.buffer()

    def operation(async_op: bool) -> Any:
        return group.in_order(
            lambda: results.append(value_of(hook(state, bucket))), async_op, buffer.device
        )

    return launch(group, buffer, operation, lambda: results[0])


def is_done(future: Any) -> bool:
    """Say whether a hook's future is complete."""
    return hasattr(future, "done") and bool(future.done())


def value_of(future: Any) -> torch.Tensor:
    """Wait for a hook's future, ours or torch's, of a tensor or of a list of one.

    Raises:
        TypeError: The hook returned something else.
    """
    if not hasattr(future, "wait"):
        raise TypeError(
            "a communication hook must return a future of the reduced bucket; got "
            f"{type(future).__name__}"
        )
    value = future.wait()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            "a communication hook's future must hold the reduced bucket, a tensor; got "
            f"{type(value).__name__}"
        )
    return value
