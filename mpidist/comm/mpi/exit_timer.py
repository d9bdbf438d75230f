"""Timer that ends the process with a chosen status, also while a call of MPI keeps Python's lock.

``faulthandler`` has such a timer, whose status is 1. This one is a POSIX timer whose thread calls
``_exit`` itself.

Source: timer_create(2), SIGEV_THREAD; the layout of ``struct sigevent`` is that of Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

_SIGEV_THREAD = 2


class _Event(ctypes.Structure):
    """The fields of ``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 64),
    )


class _Times(ctypes.Structure):
    """The fields of ``struct itimerspec``: interval and first expiration."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("interval_s", "interval_ns", "first_s", "first_ns")
    )


@contextlib.contextmanager
def exiting_after(seconds: float, status: int) -> Iterator[None]:
    """End the process with a status if the block takes longer; without a clean-up of any kind."""
    library = _library()
    function = ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p).value
    event = _Event(status, 0, _SIGEV_THREAD, function, None, b"")
    timer = ctypes.c_void_p()
    first_s, rest = divmod(seconds, 1.0)
    times = _Times(0, 0, int(first_s), int(rest * 1e9))
    is_made = not library.timer_create(
        time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)
    )
    if is_made:
        library.timer_settime(timer, 0, ctypes.byref(times), None)
    try:
        yield
    finally:
        if is_made:
            library.timer_delete(timer)


def _library() -> Any:
    own = ctypes.CDLL(None)
    # Before glibc 2.34 timers were in a library of their own.
    return own if hasattr(own, "timer_create") else ctypes.CDLL("librt.so.1")
