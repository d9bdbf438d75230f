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

from mpidist.comm.mpi.process_start import start_ticks
from mpidist.comm.mpi.processes import Processes

_PROC = Path("/proc")


class Neighbours:
    """Processes of the job that this process may signal.

    Collective: over the job's processes.

    Args:
        processes: All of the job.
    """

    def __init__(self, processes: Processes) -> None:
        own = os.getpid()
        rows = processes.gather([own, start_ticks(own), _node()])
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
            if pid and started and start_ticks(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _node() -> int:
    """Return a number of this node's process ids; 0 where the system has none."""
    try:
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="utf-8")
        return zlib.crc32((boot + os.readlink(_PROC / "self" / "ns" / "pid")).encode())
    except OSError:
        return 0
