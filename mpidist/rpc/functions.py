"""Asynchronous functions, which answer by a future: ``@rpc.functions.async_execution``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from mpidist.errors import MpidistError

P = ParamSpec("P")
T = TypeVar("T")

# torch's attribute: functions with torch's decorator work as well.
MARK = "_wrapped_async_rpc_function"


def async_execution(fn: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that returns a ``torch.futures.Future``; the caller gets the future's value.

    The thread that runs the function is free as soon as the function returns; the answer is sent
    when the future completes. Works below ``staticmethod`` and ``classmethod``, for methods, and
    through the proxies of an ``RRef``.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper


class DeferredResult:
    """The future that a marked function has returned."""

    __slots__ = ("future",)

    def __init__(self, future: object, name: str) -> None:
        if not isinstance(future, torch._C.Future):
            raise MpidistError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future "
                f"object, but {name} returned {type(future).__name__}"
            )
        self.future = future


def deferred_result(function: object, result: object) -> DeferredResult:
    """Return a marked function's result as a ``DeferredResult``.

    Raises:
        MpidistError: The result is not a future.
    """
    return (
        result
        if isinstance(result, DeferredResult)
        else DeferredResult(result, getattr(function, "__qualname__", repr(function)))
    )
