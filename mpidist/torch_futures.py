"""Errors of ``torch.futures.Future``, which each wait raises as a new exception.

C++ holds a future's error, and Python's garbage collector does not look into it. The traceback of
an exception that has been raised leads to the frames that it has passed, and one of them to the
future: the exception itself, raised by a wait, would keep alive the future, the frames and all
their variables for the life of the process.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from mpidist.exception_copy import copy_exception


def set_exception(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Complete a future with an error, which waits raise anew."""
    torch._C.Future._set_unwrap_func(future, _raise_anew)
    torch._C.Future.set_result(future, copy_exception(error))


def _raise_anew(error: BaseException) -> NoReturn:
    raise copy_exception(error)
