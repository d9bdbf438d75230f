"""Hooks on torch's ``DistributedDataParallel``: its bucket as ours, and our future as torch's."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from mpidist.comm.memory.stream import used_here
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import Hook, result_in
from mpidist.future import Future

Tensor = torch.Tensor
H = TypeVar("H", bound=Hook)


def on_either_module(hook: H) -> H:
    """Return a hook, or the ``__call__`` of one, that torch's DistributedDataParallel may call too.

    With torch's bucket ``hook`` gets a ``GradBucket`` of the same memory, and its future becomes
    torch's. The signature has no annotations: torch's module compares them with its own types.
    """

    @functools.wraps(hook)
    def either(*arguments: Any, **options: Any) -> Any:
        # Reducers pass the bucket by its place.
        bucket = arguments[place] if len(arguments) > place else None
        if not isinstance(bucket, dist.GradBucket):
            return hook(*arguments, **options)
        own, buffer = native_bucket(bucket), bucket.buffer()
        future = hook(*arguments[:place], own, *arguments[place + 1 :], **options)
        if isinstance(future, Future):
            return torch_future(future, buffer)
        # Of a user's hook within ours.
        return future.then(lambda ended: result_in(ended.value(), buffer.numel()))

    parameters = inspect.signature(hook).parameters
    place = list(parameters).index("bucket")
    either.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(annotation=inspect.Parameter.empty) for one in parameters.values()]
    )
    return cast("H", either)


def name_of(hook: Hook) -> str:
    """Return a hook's name, as torch's DistributedDataParallel logs it."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def native_bucket(bucket: dist.GradBucket) -> GradBucket:
    """Return torch's bucket as a ``GradBucket`` of the same memory, with empty names."""
    parameters = bucket.parameters()
    held = Bucket(
        range(len(parameters)), parameters, [""] * len(parameters), flat=bucket.buffer().view(-1)
    )
    return GradBucket(held, bucket.index(), bucket.is_last())


def torch_future(future: Future[Tensor], buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future of torch's with the value or the exception of ours.

    Args:
        future: Of a bucket's result.
        buffer: The bucket's.
    """
    ended: torch.futures.Future[None] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    # Called in a callback, whose exception also fails torch's reducer.
    outcome = ended.then(lambda _: used_here(result_in(future.value(), buffer.numel())))
    future.add_done_callback(lambda _: ended.set_result(None))
    return outcome
