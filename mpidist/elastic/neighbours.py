"""Processes of the job on this node, some of which may count as dead without having ended.

A heartbeat detector declares a process dead that is stopped, or whose machine is overloaded. It may
run on at any time, when the others have gone on without it, and the launcher waits for it at the
job's end. So a survivor on its node kills it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import zlib
from collections.abc import Iterable
from pathlib import Path

from mpidist.comm.mpi.processes import Processes

_PROC = Path("/proc")
_START = 19  # of the fields of /proc/PID/stat behind the command's name: the time of the start


class Neighbours:
    """Processes of the job that this process may signal.

    Collective: over the job's processes.

    Args:
        processes: All of the job.
    """

    def __init__(self, processes: Processes) -> None:
        own = os.getpid()
        rows = processes.gather([own, _started(own), _node()])
        self._here = {
            number: (pid, started)
            for number, (pid, started, node) in enumerate(rows)
            if node == _node() and pid != own
        }

    def end(self, numbers: Iterable[int]) -> None:
        """Kill those of these processes that are on this node and have not ended. Local.

        Args:
            numbers: Of processes that count as dead, among those of the job's start.
        """
        for number in numbers:
            pid, started = self._here.pop(number, (0, 0))
            # The kernel may have given the number of an ended process to another one.
            if pid and started and _started(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _started(pid: int) -> int:
    """Return the time of a process's start in ticks of its kernel; 0 if it has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    state, *rest = text.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(rest[_START - 1])


def _node() -> int:
    """Return a number of this node's process ids; 0 where the system has none."""
    try:
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text()
        return zlib.crc32((boot + os.readlink(_PROC / "self" / "ns" / "pid")).encode())
    except OSError:
        return 0
