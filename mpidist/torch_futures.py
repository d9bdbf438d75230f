"""Completion of ``torch.futures.Future`` by this library, beside users who may complete it as well.

The first completion counts. A user's own, as by a time limit of his, is no error of the thread that
has the result: the result is dropped.

C++ holds a future's error, and Python's garbage collector does not look into it. The traceback of
an exception that has been raised leads to the frames that it has passed, and one of them to the
future: the exception itself, raised by a wait, would keep alive the future, the frames and all
their variables for the life of the process. So each wait raises a new exception.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from mpidist.exception_copy import copy_exception


class _Failure:
    """Error in place of a future's value."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def set_result(future: torch.futures.Future[Any], result: object) -> None:
    """Complete a future; with an error if it cannot hold the result, as one on another device."""
    try:
        torch._C.Future.set_result(future, result)
    except Exception as error:
        set_exception(future, error)


def set_exception(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Complete a future with an error, which waits raise anew."""
    # Not those of a complete future, which has the reader of who has completed it.
    if future.done():
        return
    torch._C.Future._set_unwrap_func(future, _value)
    # Completed by its user in between; ``_value`` returns what he has set.
    with contextlib.suppress(RuntimeError):
        torch._C.Future.set_result(future, _Failure(copy_exception(error)))


def _value(outcome: object) -> object:
    if isinstance(outcome, _Failure):
        raise copy_exception(outcome.error)
    return outcome
