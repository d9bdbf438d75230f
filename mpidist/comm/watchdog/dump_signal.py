"""Signal SIGUSR2: a request for the flight record of a process, also while MPI blocks it.

SIGINT and SIGTERM, where the process handles them, are noted in the same way.

Python runs a handler in the main thread, between two instructions of Python: not while that thread
waits in MPI. The interpreter writes the signal's number into a pipe at once, and the watchdog's
thread reads the pipe. An event loop that ends (``asyncio.run``) leaves the interpreter without a
pipe: the handler then writes the number, and takes the pipe again. A forked child, whose signals
are not the rank's, writes none into it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from mpidist.comm.mpi import forked_child

_NUMBER = signal.SIGUSR2
_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM})


class DumpSignal:
    """The handler of SIGUSR2, and the pipe.

    Not installed outside the main thread, nor if the process handles the signal itself, or hands
    its signals to another pipe (``signal.set_wakeup_fd``).

    Attributes:
        interrupts: Number of reads by ``has_arrived`` that found a SIGINT or SIGTERM.
    """

    def __init__(self) -> None:
        self._reading = self._writing = -1
        self.is_installed = False
        self.interrupts = 0
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(_NUMBER) is not signal.SIG_DFL:
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
            os.close(reading)
            os.close(writing)
            return
        signal.signal(_NUMBER, self._handle)
        self._reading, self._writing, self.is_installed = reading, writing, True
        forked_child.register(self)

    def has_arrived(self) -> bool:
        """Return whether the signal has arrived since the last call; reads the pipe empty."""
        if not self.is_installed:
            return False
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reading, 512):
                numbers += data
        self.interrupts += not _INTERRUPTS.isdisjoint(numbers)
        # A handler of the user's that was installed later has taken the signal.
        return _NUMBER in numbers and signal.getsignal(_NUMBER) == self._handle

    def leave_to_parent(self) -> None:
        """Have signals written nowhere; called in a forked child."""
        self.is_installed = False
        former = signal.set_wakeup_fd(-1)
        if former not in (-1, self._writing):
            signal.set_wakeup_fd(former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Have the interpreter write signals into the pipe, and write this one if it has not."""
        if not self.is_installed:
            return
        former = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if former == self._writing:
            return
        if former != -1:
            signal.set_wakeup_fd(former)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, bytes((number,)))


def ignore(number: int, frame: FrameType | None) -> None:
    """Take a signal and do nothing."""
