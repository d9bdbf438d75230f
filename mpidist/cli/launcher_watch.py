"""Watch over a launcher: ends one that stays when all of its processes are gone.

Open MPI's launcher (5.0, ``--with-ft ulfm``) waits for ever where a process ends while others call
MPI_Abort or connect to it. The watch is a process of its own, because ``mpidist run`` becomes the
launcher by exec. It ends with the launcher.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

GRACE_S = 10.0  # of a launcher without a process: it may have output to pass on
_POLL_S = 1.0
_STATE, _PARENT = 0, 1  # fields of /proc/<process>/stat behind the program's name
_OUTPUTS = (1, 2)


def start(launcher: int, grace_s: float = GRACE_S) -> None:
    """Watch a launcher of this node, which this process has started or is about to become.

    Args:
        launcher: Its process.
        grace_s: How long it may stay without a process of its own.
    """
    try:
        ends = os.pidfd_open(launcher)
    except (AttributeError, OSError):  # Linux before 5.3, or it has ended
        return
    child = os.fork()
    if child == 0:
        # A second fork: the watch is no child of the launcher.
        with contextlib.suppress(BaseException):
            if os.fork() == 0:
                os.setsid()
                _watch(launcher, ends, grace_s)
        os._exit(0)
    os.close(ends)
    os.waitpid(child, 0)


def _watch(launcher: int, ends: int, grace_s: float) -> None:
    """Kill the launcher when it has been without a process for the grace time."""
    has_started, idle_since = False, None
    while not select.select([ends], [], [], _POLL_S)[0]:
        has_processes = bool(children(launcher))
        has_started = has_started or has_processes
        if has_processes or _is_stopped(launcher):
            idle_since = None
        elif has_started and not _is_output_blocked():
            idle_since = idle_since or time.monotonic()
            if time.monotonic() - idle_since >= grace_s:
                text = (
                    f"mpidist run: all processes of the job are gone, and its launcher has not "
                    f"ended {grace_s:g} s later: it is killed\n"
                )
                with contextlib.suppress(OSError):
                    os.write(2, text.encode())
                signal.pidfd_send_signal(ends, signal.SIGKILL)
                return


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped, as by Ctrl-Z, and goes on when it is continued."""
    try:
        return _fields(process)[_STATE] in "Tt"
    except OSError:  # it has ended
        return False


def _is_output_blocked() -> bool:
    """Return whether a reader of the job's output takes none, for which the launcher waits."""
    poll = select.poll()
    for file in _OUTPUTS:
        poll.register(file, select.POLLOUT)
    ready = dict(poll.poll(0))
    return any(file not in ready for file in _OUTPUTS)


def children(process: int) -> list[int]:
    """Return the children of a process that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        number = int(path.parent.name)
        try:
            fields = _fields(number)
        except OSError:  # it has ended
            continue
        if int(fields[_PARENT]) == process and fields[_STATE] != "Z":
            found.append(number)
    return found


def _fields(process: int) -> list[str]:
    text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
