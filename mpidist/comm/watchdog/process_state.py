"""State of a silent rank's process, as the kernel of this host has it.

A process that does not answer cannot say why. Where it is on this host, ``/proc/PID/stat`` does:
proc(5).
"""

from __future__ import annotations

import signal
from pathlib import Path

from mpidist.comm.mpi.world import Process

_PROC = Path("/proc")
# Fields behind the command's name in parentheses: the state is the first, the status the 50th.
_STATUS = 49
_LIVING = {
    "R": "it computes, and keeps Python's interpreter lock",
    "S": "it waits in a call that keeps Python's interpreter lock",
    "D": "it waits for a disk or a file system",
    "T": "it is stopped: kill -CONT {pid}",
    "t": "a debugger has stopped it",
}


def words(process: Process, host: str) -> str:
    """Return what is known of a process; empty if it is on another host, or nothing is known.

    Args:
        process: Of the silent rank.
        host: This process's.
    """
    if process.host != host or not (_PROC / "self" / "stat").exists():
        return ""
    try:
        text = (_PROC / str(process.pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return (
            f"it has ended: no process {process.pid} on {host}. dmesg there, or the launcher's "
            "last lines, say what killed it"
        )
    except OSError:
        return ""
    state, *rest = text.rpartition(")")[2].split()
    if state in _LIVING:
        return _LIVING[state].format(pid=process.pid)
    if state not in "ZX":
        return ""
    # Its launcher has not asked for the status yet, which is 0 to processes of other users.
    number = int(rest[_STATUS - 1]) & 0x7F if len(rest) >= _STATUS else 0
    return f"it was killed by signal {number} ({_name(number)})" if number else "it has ended"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
