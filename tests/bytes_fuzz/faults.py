"""Target with every fault that the command must report; the first byte of a case selects it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

_SPIN_S = 600
_sleep = ctypes.PyDLL(None).sleep  # keeps the GIL, so that Python runs no signal handler


def _allocate() -> None:
    held = bytearray(4 << 30)
    held[::4096] = b"\1" * len(held[::4096])


def _grow() -> None:
    held = bytearray(200 << 20)
    held[::4096] = b"\1" * len(held[::4096])


def _spin() -> None:
    while True:  # a signal ends each of them
        _sleep(_SPIN_S)


def _open() -> None:
    with open("/etc/hostname"):
        time.sleep(0)


def _swallowed() -> None:
    try:
        _open()
    except RuntimeError:
        return


def _raise() -> None:
    raise KeyError("not ours")


_FAULTS: dict[int, Callable[[], None]] = {
    ord("k"): lambda: os.kill(os.getpid(), signal.SIGSEGV),
    ord("x"): lambda: os._exit(0),
    ord("s"): _spin,
    ord("o"): _open,
    ord("w"): _swallowed,
    ord("m"): _allocate,
    ord("g"): _grow,
    ord("i"): lambda: __import__("this") and None,
    ord("e"): lambda: exec("1"),
    ord("r"): _raise,
}


def samples() -> list[bytes]:
    """Return a harmless case."""
    return [b"a harmless case"]


def check(case: bytes) -> None:
    """Commit the fault of a case's first byte."""
    if (
        case[:1] in (b"k", b"x", b"s", b"o", b"w", b"m", b"g", b"i", b"e", b"r")
        and case[1:2] == b"!"
    ):
        _FAULTS[case[0]]()
