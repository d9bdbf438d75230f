"""Functions that answer later: ``@rpc.functions.async_execution``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mpidist.errors import MpidistError

# torch's name: functions that its decorator has marked are served as well
MARK = "_wrapped_async_rpc_function"


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose result is a ``torch.futures.Future``; the caller gets what that future brings.

    The thread that runs the function is free as soon as it returns; the answer goes out when the
    future is complete. Works under ``staticmethod`` and ``classmethod`` (which come first), for
    methods, and through the proxies of an ``RRef``.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper


class DeferredResult:
    """The result of a function that answers later."""

    __slots__ = ("future",)

    def __init__(self, future: Any, name: str) -> None:
        if not isinstance(future, torch._C.Future):
            raise MpidistError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future "
                "object, "
                f"but {name} returned {type(future).__name__}"
            )
        self.future = future


def deferred_result(function: Any, result: Any) -> DeferredResult:
    """Return what a marked function's result means."""
    return (
        result
        if isinstance(result, DeferredResult)
        else DeferredResult(result, getattr(function, "__qualname__", repr(function)))
    )
