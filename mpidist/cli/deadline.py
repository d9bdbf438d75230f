"""Deadline of this process, kept by a forked watcher: it also holds while a library keeps Python's lock, as MPI_Init does.

The watcher waits for a byte on a pipe. If the pipe ends without one, the process has died inside
the block; if nothing comes in time, it is ended. In both cases the watcher says so on stderr,
because the process itself cannot.
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
    """End this process if the block takes too long, and say so if the block ends it.

    Enter it before MPI and CUDA start: the watcher is a fork.

    Args:
        limit_s: Seconds.
        late: Printed to stderr before the process is killed.
        died: Printed to stderr if the process ends within the block by anything but an exception.
    """
    end, begin = os.pipe()
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; this child calls nothing but the kernel.
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
    # Ctrl-C and the launcher's SIGTERM go to the whole group; the parent's end is what counts here.
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
