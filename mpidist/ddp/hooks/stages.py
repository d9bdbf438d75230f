"""The order of a hook's collectives: the same on all ranks, whatever finishes first.

A hook of several stages starts its second collective when the first has ended, often in a future's
callback. Left to itself, one rank would then start it before the next bucket's first collective and
another after it, and different collectives would meet. So a bucket's stages are one operation of
the group (``in_order``): whatever a hook issues has ended when the call returns, its callbacks run
where they are attached, and the next bucket waits behind it. Between nodes, and on CUDA, that
happens on the group's thread, beside the backward pass. A hook that promises to need no such care
is called in the backward pass itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mpidist.future import Future, completed

Hook = Callable[[Any, Any], Any]
H = TypeVar("H", bound=Hook)


def in_order(hook: H) -> H:
    """Mark a hook that starts all its collectives before it returns, or as one ``group.in_order``."""
    hook.is_in_order = True  # type: ignore[attr-defined]
    return hook


def is_in_order(hook: Hook) -> bool:
    """Say whether a hook is marked so."""
    return getattr(hook, "is_in_order", False)


def overlaps_backward(group: Any, tensor: torch.Tensor) -> bool:
    """Say whether a tensor is reduced beside the backward pass, on the group's thread.

    On one node a transfer of host memory is processor time, which a thread cannot hide. Between
    nodes it is waiting; and if the tensor is on a device, the host must go on to feed the device. A
    rank by itself transfers nothing.
    """
    return group.size > 1 and (tensor.is_cuda or not group.is_single_node)


def run_stages(
    group: Any, buffer: torch.Tensor, stages: Callable[[], Any], waits_for_device: bool = False
) -> Future[torch.Tensor]:
    """Execute ``stages()``, which reduces ``buffer`` in place, as one operation of the group; return a future of the buffer.

    Blocks: until it has ended, unless it ``overlaps_backward``.

    Args:
        waits_for_device: A stage lets the host wait for what it has computed on a device; it then
            runs beside the backward pass on a rank by itself, too.
    """
    if not (overlaps_backward(group, buffer) or (waits_for_device and buffer.is_cuda)):
        stages()
        return completed(buffer)
    work = group.in_order(stages, device=buffer.device)
    # raises what a stage raised
    return work.get_future().then(lambda ended: (ended.value(), buffer)[1])


def call_hook(hook: Hook, state: Any, bucket: Any, group: Any) -> Future[torch.Tensor]:
    """Call ``hook(state, bucket)``; return a future of the reduced buffer.

    Blocks: until the bucket is reduced, unless it ``overlaps_backward``.

    Raises:
        TypeError: The hook returned no future of a tensor (raised by the future, between nodes).
    """
    if is_in_order(hook):
        return hook(state, bucket)
    values: list[torch.Tensor] = []
    is_beside, device = overlaps_backward(group, bucket.buffer()), bucket.buffer().device
    work = group.in_order(
        lambda: values.append(value_of(hook(state, bucket))), async_op=is_beside, device=device
    )
    if work is None:
        return completed(values[0])
    # raises what the hook raised
    return work.get_future().then(lambda ended: (ended.value(), values[0])[1])


def is_done(future: Any) -> bool:
    """Say whether what a hook returned, a future or None, is complete."""
    return future is None or (hasattr(future, "done") and bool(future.done()))


def value_of(future: Any) -> torch.Tensor:
    """Wait for what a hook returned: a future, ours or torch's, of a tensor or of a list of one.

    Raises:
        TypeError: Something else.
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
