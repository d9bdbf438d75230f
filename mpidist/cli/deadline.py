"""Deadline of this process, enforced by a forked watcher process.

A thread could not enforce the deadline, because a library may hold the GIL, as MPI_Init does. The
watcher waits for a byte on a pipe. End of file without the byte means that the process died inside
the block. Without the byte at the deadline, the watcher kills the process. In both cases the
watcher prints a message to stderr, because the process cannot.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import warnings
from collections.abc import Iterator

_DONE = b"."


@contextlib.contextmanager
def deadline(limit_s: float, late: str, died: str) -> Iterator[None]:
    """Kill this process if the block exceeds a time limit; report a death inside the block.

    Must be entered before MPI and CUDA start, because the watcher is a fork.

    Args:
        limit_s: Limit in seconds.
        late: Printed to stderr before the process is killed.
        died: Printed to stderr if the process ends within the block without an exception.
    """
    end, begin = os.pipe()
    with warnings.catch_warnings():
        # Python warns about fork in a process with threads; this child makes system calls only.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent, watcher = os.getpid(), os.fork()
    if watcher == 0:
        os.close(begin)
        _watch(end, parent, limit_s, late.encode(), died.encode())
    os.close(end)
    try:
        yield
    finally:
        os.write(begin, _DONE)
        os.close(begin)
        os.waitpid(watcher, 0)


def _watch(end: int, parent: int, limit_s: float, late: bytes, died: bytes) -> None:
    # Ctrl-C and the launcher's SIGTERM reach the whole process group, but the watcher has to
    # outlive the parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    if not poll.poll(limit_s * 1e3):
        os.write(2, late + b"\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    elif os.read(end, 1) != _DONE:
        os.write(2, died + b"\n")
    os._exit(0)
