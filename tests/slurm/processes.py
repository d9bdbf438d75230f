"""Processes of a virtual cluster: known by a variable in their environment, found in /proc, ended by their ids."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# All daemons have it in their environment, and jobs from whom submits them: it tells the processes
# of a cluster from others.
MARK = "SLURM_CONF"
_PATIENCE_S = 5.0  # between SIGTERM and SIGKILL


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the daemons and commands of the cluster in ``folder``."""
    return {**os.environ, MARK: str(folder / "slurm.conf")}


def marked(folder: Path) -> list[int]:
    """Return the processes whose environment has the mark of ``folder``, this one and its parents excepted."""
    mark = f"{MARK}={folder / 'slurm.conf'}".encode()
    own = {os.getpid(), os.getppid()}
    pids = [
        int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in own
    ]
    return [
        pid for pid in pids if mark in read(pid, "environ").split(b"\0") and not _is_zombie(pid)
    ]


def _is_zombie(pid: int) -> bool:
    return b"\nState:\tZ" in read(pid, "status")


def read(pid: int, name: str) -> bytes:
    """Return a file of ``/proc/PID``; nothing where the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def end(pids: Iterable[int]) -> None:
    """Send SIGTERM, one after another, and SIGKILL to those that do not end."""
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
            if wait(lambda pid=pid: _has_ended(pid), _PATIENCE_S):
                break


def _has_ended(pid: int) -> bool:
    """Say whether a process has ended; take the exit status of a child."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    return not Path(f"/proc/{pid}").exists() or _is_zombie(pid)


def wait(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until ``condition()`` holds; say whether it did within the limit."""
    latest = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > latest:
            return False
        time.sleep(0.05)
    return True
