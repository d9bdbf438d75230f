"""Processes of a virtual cluster: marked by an environment variable, found in /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# Daemons have this variable in their environment, and jobs inherit it at submission. The value
# identifies the cluster's processes.
MARK = "SLURM_CONF"
# Delay between SIGTERM and SIGKILL.
_TERM_TIMEOUT_S = 5.0


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the daemons and commands of the cluster in ``folder``."""
    return {**os.environ, MARK: str(folder / "slurm.conf")}


def marked(folder: Path) -> list[int]:
    """Return processes with the mark of ``folder``, except this one and its parents."""
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
    """Return a file of ``/proc/PID``; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def end(pids: Iterable[int]) -> None:
    """Send SIGTERM to each process, and SIGKILL to those that remain."""
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
            if wait(lambda pid=pid: _has_ended(pid), _TERM_TIMEOUT_S):
                break


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended; reap a child."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    return not Path(f"/proc/{pid}").exists() or _is_zombie(pid)


def wait(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until ``condition()`` holds; return whether it held within the limit."""
    latest = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > latest:
            return False
        time.sleep(0.05)
    return True
