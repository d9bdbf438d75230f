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

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch

from mpidist.comm.execution.work import Work
from mpidist.comm.group_types import Group
from mpidist.comm.memory.stream import used_here
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.future import Future, completed

Tensor = torch.Tensor


class InvalidResult(Exception):
    """Base of the errors of what a hook has returned.

    The hook has ended, and with it the bucket's collectives. So the rank takes part in those that
    follow, and the end of the backward pass raises the error on all ranks.
    """


class NoTensor(InvalidResult, TypeError):
    """A hook returned no future, or one that holds no dense tensor."""


class WrongLength(InvalidResult, ValueError):
    """A hook returned a tensor of another number of elements than the bucket."""


class Completed(Protocol):
    """A complete future in a callback."""

    def value(self) -> Tensor | Sequence[Tensor]:
        """Return the reduced buffer, perhaps in a list as in torch, or raise the exception."""


class BucketFuture(Completed, Protocol):
    """A future of the reduced buffer, ours or torch's."""

    def wait(self) -> Tensor | Sequence[Tensor]:
        """Wait, and return ``value()``."""

    def then(self, callback: Callable[[Completed], Tensor]) -> BucketFuture:
        """Return a future of ``callback(self)``."""


# Called with the registered state and a GradBucket.
Hook: TypeAlias = Callable[..., BucketFuture]
H = TypeVar("H", bound=Hook)


def in_order(hook: H) -> H:
    """Mark a hook that starts all collectives before it returns, or as one ``group.in_order``.

    The reducer calls a marked hook directly and reads the future at the end of the backward pass,
    which raises TypeError if the hook has returned None in place of a future of a tensor.
    """
    hook.is_in_order = True  # type: ignore[attr-defined]
    return hook


def is_in_order(hook: Hook) -> bool:
    """Return whether a hook is marked ``in_order``."""
    return getattr(hook, "is_in_order", False)


def overlaps_backward(group: Group, tensor: Tensor) -> bool:
    """Return whether a tensor is reduced on the group's thread during backward.

    On one node a transfer of host memory is processor time, which a thread cannot hide. Between
    nodes the processor waits for the network, and for a tensor on a device the host must go on to
    queue kernels. One rank alone transfers nothing.
    """
    return group.size > 1 and (tensor.is_cuda or not group.is_single_node)


def launch(
    group: Group,
    buffer: Tensor,
    operation: Callable[[bool], Work | None],
    result: Callable[[], Tensor],
    waits_for_device: bool = False,
) -> Future[Tensor]:
    """Execute ``operation(async_op)``; return a future of the reduced buffer.

    Blocks: until the operation has ended, unless it ``overlaps_backward``.

    Args:
        operation: Returns a Work if ``async_op``, else None after the end.
        result: Returns the future's value.
        waits_for_device: The operation makes the host wait for the device, and therefore runs on
            the group's thread on a single rank, too.
    """
    work = operation(overlaps_backward(group, buffer) or (waits_for_device and buffer.is_cuda))
    if work is None:
        return completed(result())
    # ``value()`` raises the operation's exception.
    return work.get_future().then(lambda ended: (ended.value(), result())[1])


def run_stages(
    group: Group, buffer: Tensor, stages: Callable[[], object], waits_for_device: bool = False
) -> Future[Tensor]:
    """Execute ``stages()``, which reduces ``buffer`` in place; see ``launch``."""

    def operation(async_op: bool) -> Work | None:
        if async_op:
            return group.in_order(stages, device=buffer.device)
        stages()
        return None

    return launch(group, buffer, operation, lambda: buffer, waits_for_device)


def call_hook(hook: Hook, state: object, bucket: GradBucket, group: Group) -> BucketFuture:
    """Call ``hook(state, bucket)``; return a future of the reduced buffer.

    Blocks: until the bucket is reduced, unless it ``overlaps_backward``.

    Raises:
        NoTensor: The hook returned no future of a tensor (raised by the future if it overlaps, by
            ``value_of`` if the hook is marked ``in_order``).
    """
    if is_in_order(hook):
        return hook(state, bucket)
    results: list[Tensor] = []
    buffer = bucket.buffer()

    def operation(async_op: bool) -> Work | None:
        return group.in_order(
            lambda: results.append(value_of(hook(state, bucket))), async_op, buffer.device
        )

    return launch(group, buffer, operation, lambda: results[0])


def is_done(future: BucketFuture) -> bool:
    """Return whether a hook's future is complete."""
    return hasattr(future, "done") and bool(future.done())


def value_of(future: BucketFuture, numel: int | None = None) -> Tensor:
    """Wait for a hook's future, ours or torch's, of a tensor or of a list of one.

    Args:
        numel: Number of elements of the bucket; None for any.

    Raises:
        InvalidResult: The hook returned something else.
    """
    return result_in(future_of(future).wait(), numel)


def result_in(value: object, numel: int | None = None) -> Tensor:
    """Return the tensor that is the value of a hook's future, or in it; see ``value_of``."""
    value = _unlisted(value)
    refusal = _refusal_of(value, numel)
    if refusal is not None:
        raise refusal
    return cast("Tensor", value)


def applied(function: Callable[[Tensor], Tensor], numel: int) -> Callable[[Completed], Tensor]:
    """Return a callback of a hook's future: ``function`` on the tensor that it holds.

    What is no result of ``numel`` elements is handed on, for the module to refuse: torch's futures
    do not keep the class of an exception.
    """

    def callback(future: Completed) -> Any:
        value = _unlisted(future.value())
        if _refusal_of(value, numel) is not None:
            return value
        return function(used_here(cast("Tensor", value)))

    return callback


def future_of(returned: BucketFuture) -> BucketFuture:
    """Return what a hook has returned.

    Raises:
        NoTensor: It is no future.
    """
    if not hasattr(returned, "wait") or not hasattr(returned, "then"):
        raise NoTensor(
            "a communication hook must return a future of the reduced bucket; got "
            f"{type(returned).__name__}"
        )
    return returned


def _unlisted(value: object) -> object:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _refusal_of(value: object, numel: int | None) -> InvalidResult | None:
    if not isinstance(value, torch.Tensor):
        return NoTensor(
            "a communication hook's future must hold the reduced bucket, a tensor; got "
            f"{type(value).__name__}"
        )
    if value.layout is not torch.strided or value.is_nested or not (value.is_cpu or value.is_cuda):
        return NoTensor(
            "a communication hook's future must hold the reduced bucket, a dense tensor on the CPU "
            f"or a CUDA device; got layout {value.layout} on {value.device}"
        )
    if numel is not None and value.numel() != numel:
        return WrongLength(
            f"a communication hook must return {numel} elements; got shape {tuple(value.shape)}"
        )
    return None
