"""File of a process's stacks, which SIGUSR2 has faulthandler write: in C, also while MPI blocks it.

faulthandler runs in the signal's handler, without Python's lock, so that a thread in MPI, or in C
code that keeps the lock, does not delay it. The handler before it, Python's own with that of the
program or of ``DumpSignal``, is called behind it. The watchdog then adds the table of threads
(``thread_stacks``), as soon as it gets Python's lock. A forked child takes the signal without
stacks: the file is its parent's.

A reader empties the file before it sends the signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import IO, NamedTuple

from mpidist import shared_place
from mpidist.comm.mpi import forked_child
from mpidist.comm.watchdog import dump_signal, thread_stacks

_NUMBER = signal.SIGUSR2
_PREFIX = "stacks"


def path_beside(recorder: Path) -> Path:
    """Return the file of the process with this file of a recorder: ``stacks-3``, ``recorder-3``."""
    return recorder.with_name(f"{_PREFIX}-{recorder.name.rpartition('-')[2]}")


class _State(NamedTuple):
    """Size of the file, and the time of its last change: a reader may have emptied it since."""

    size: int
    changed_ns: int


class StackFile:
    """The file, and faulthandler's handler of the signal.

    Not installed outside the main thread, or where the file cannot be made.

    Args:
        path: Of the file, which is replaced.

    Attributes:
        is_installed: The signal writes the stacks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_installed = False
        self._file: IO[bytes] | None = None
        self._written = self._seen = _State(0, 0)
        self._handler: object = None
        if threading.current_thread() is not threading.main_thread():
            return
        with contextlib.suppress(OSError):
            made = shared_place.made(path, os.O_WRONLY | os.O_APPEND)
            self._file = open(made, "ab", buffering=0)  # noqa: SIM115
            # faulthandler's record of an earlier file may be of a handler that was replaced since.
            handler = signal.getsignal(_NUMBER)
            faulthandler.unregister(_NUMBER)
            if handler is not None:
                signal.signal(_NUMBER, handler)
            self._install()
            forked_child.register(self)

    def serve(self) -> None:
        """Add the table of threads to stacks that were written before the last call.

        A handler of the program's that was installed meanwhile is called behind faulthandler.
        """
        if self._file is None:
            return
        handler = signal.getsignal(_NUMBER)
        if handler is not self._handler and callable(handler) and callable(self._handler):
            # Python's handler in C is the same one for all functions.
            faulthandler.unregister(_NUMBER)
            self._install()
        state = self._state()
        # Text that has changed since the last call may still be written, by another thread.
        if state.size and state != self._written and state == self._seen:
            self._add_table()
        self._seen = state

    def write(self) -> None:
        """Write the stacks of all threads, and the table, in the place of those before."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), 0)
            faulthandler.dump_traceback(self._file, all_threads=True)
            self._add_table()

    def leave_to_parent(self) -> None:
        """Take the signal without stacks; called in a forked child."""
        if self._file is None or not self.is_installed:
            return
        self._file = None
        self.is_installed = False
        handler = signal.getsignal(_NUMBER)
        faulthandler.unregister(_NUMBER)
        # The default action would end the child by a signal to all processes of a job.
        if handler is signal.SIG_DFL:
            handler = dump_signal.ignore
        if handler is not None:
            signal.signal(_NUMBER, handler)

    def _install(self) -> None:
        assert self._file is not None
        self._handler = signal.getsignal(_NUMBER)
        # Behind the default action there would be no process.
        is_default = self._handler is signal.SIG_DFL
        faulthandler.register(_NUMBER, self._file, all_threads=True, chain=not is_default)
        self.is_installed = True

    def _add_table(self) -> None:
        assert self._file is not None
        table = thread_stacks.table(
            (thread.ident or 0, thread.native_id or 0, thread.name)
            for thread in threading.enumerate()
        )
        with contextlib.suppress(OSError):
            self._file.write(table.encode(errors="backslashreplace"))
        self._written = self._state()

    def _state(self) -> _State:
        assert self._file is not None
        status = os.fstat(self._file.fileno())
        return _State(status.st_size, status.st_mtime_ns)
