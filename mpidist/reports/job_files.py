"""Files of a job on this node: recordings, and stacks, for which living processes are asked."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist import shared_place
from mpidist.comm.mpi import job_folder, launcher_env, rank_ranges
from mpidist.comm.recorder.recording import Recording, read_folder
from mpidist.comm.watchdog import thread_stacks
from mpidist.comm.watchdog.stack_file import path_beside
from mpidist.comm.watchdog.thread_stacks import Stack
from mpidist.errors import MpidistError
from mpidist.reports import worlds
from mpidist.reports.job import ELSEWHERE, ENDED, RUNS, STOPPED, Job

_ASK_S = 2.0  # longest wait for the stacks of living processes
_LOOK_S = 0.02
_MOST_BYTES = 1 << 28  # of a file
_NUMBER = signal.SIGUSR2


class Found(NamedTuple):
    """A job with files on this node.

    Attributes:
        name: Its name.
        folder: Of its files.
        first: Recording of its lowest rank here, of its first program.
    """

    name: str
    folder: Path
    first: Recording


def jobs() -> list[Found]:
    """Return this user's jobs that have recordings on this node, the newest first."""
    found = []
    for folder in job_folder.jobs_folders():
        if current := _recordings(folder)[0]:
            first = next(iter(next(iter(current.values())).values()))
            found.append(Found(first.job, folder, first))
    return sorted(found, key=lambda job: -job.first.started_wall_ns)


def chosen(name: str | None, found: Collection[Found]) -> Found:
    """Return the job of a name, or of the only one that begins with it; the newest for None.

    Raises:
        MpidistError: There is none, or several begin so.
    """
    if not found:
        raise MpidistError(
            "no job of yours has left a recording on this node: a job that ends well removes its "
            "own, and one with MPIDIST_RECORDER=0 has none"
        )
    begins = "" if name is None else launcher_env.in_file_names(name)
    alike = [job for job in found if name is None or job.name == begins]
    alike = alike or [job for job in found if job.name.startswith(begins)]
    if not alike or (name is not None and len(alike) > 1):
        names = ", ".join(job.name for job in found)
        problem = "several jobs begin with" if alike else "there is no recording here of job"
        raise MpidistError(f"{problem} {name!r}; jobs of this node: {names}")
    return alike[0]


def read(folder: Path, *, asks: bool = True) -> list[Job]:
    """Return the job whose files are in a folder: each of its worlds, as a rule one.

    Blocks: up to two seconds, until living processes have written their stacks.

    Args:
        asks: Ask living processes of this node for their stacks; else take those that are there.

    Raises:
        MpidistError: The folder has no recording.
    """
    current, left_out = _recordings(folder)
    if not current:
        reasons = "".join(f"; {reason}" for reason in left_out)
        raise MpidistError(f"{folder} has no recording (recorder-0, recorder-1, ...){reasons}")
    host = os.uname().nodename
    if asks:
        every = [each for found in current.values() for each in found.values()]
        _ask(each for each in every if _state(each, host) == RUNS)
        # Of the same moment as the stacks.
        current = _recordings(folder)[0] or current
    return [
        _job(found, host, () if number else left_out)
        for number, found in enumerate(current.values())
    ]


def _job(found: dict[int, Recording], host: str, left_out: Sequence[str]) -> Job:
    stacks = {rank: stacks_of(each) for rank, each in found.items()}
    seen = {rank: path_beside(each.path) for rank, each in found.items() if stacks[rank]}
    return Job(
        found,
        {rank: _state(each, host) for rank, each in found.items()},
        {rank: each for rank, each in stacks.items() if each},
        {host: time.monotonic_ns()},
        {rank: path.stat().st_mtime_ns for rank, path in seen.items()},
        left_out,
    )


def stacks_of(each: Recording) -> list[Stack]:
    """Return the stacks that a process has written last."""
    with contextlib.suppress(OSError):
        return thread_stacks.parsed(_stacks_text(each, is_own=False))
    return []


def _stacks_text(each: Recording, is_own: bool) -> str:
    return shared_place.text_of(path_beside(each.path), _MOST_BYTES, is_own=is_own)


def _recordings(folder: Path) -> tuple[dict[str, dict[int, Recording]], list[str]]:
    """Return the recordings of the last job of a folder by world, and why others are left out.

    Jobs that share a folder of the user have replaced each other's files.
    """
    known, left_out = read_folder(folder)
    if not known:
        return {}, left_out
    last = max(known, key=lambda each: each.started_wall_ns)
    others: dict[str, set[int]] = {}
    for each in known:
        if each.job != last.job:
            others.setdefault(each.job, set()).add(each.rank)
    left_out += [
        f"{rank_ranges.named(ranks)} of job {name}, in the same folder"
        for name, ranks in others.items()
    ]
    current, past = worlds.of(each for each in known if each.job == last.job)
    return current, left_out + past


def _state(each: Recording, host: str) -> str:
    if each.host != host:
        return ELSEWHERE
    if not each.is_alive:
        return ENDED
    return STOPPED if _field(each.pid, "State:").startswith(("T", "t")) else RUNS


def _field(pid: int, name: str) -> str:
    """Return a field of a process's status; "" if the kernel does not say it."""
    with contextlib.suppress(OSError):
        for line in (
            Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith(name):
                return line[len(name) :].strip()
    return ""


def _ask(recordings: Iterable[Recording]) -> None:
    """Have processes write their stacks; wait until they have, or the time is over."""
    waiting = [each for each in recordings if _can_be_asked(each)]
    for each in waiting:
        with contextlib.suppress(OSError):
            path = path_beside(each.path)
            file = shared_place.opened(path, _MOST_BYTES, writes=True)
            with open(file, "wb", buffering=0) as stacks:
                stacks.truncate(0)
            os.kill(each.pid, _NUMBER)
    end = time.monotonic() + _ASK_S
    while waiting and time.monotonic() < end:
        time.sleep(_LOOK_S)
        waiting = [each for each in waiting if not _has_answered(each)]


def _can_be_asked(each: Recording) -> bool:
    """Return whether the signal has the process write its stacks; it ends one without a handler.

    Files of another user may name any process of this one.
    """
    try:
        for path in (each.path, path_beside(each.path)):
            os.close(shared_place.opened(path, _MOST_BYTES))
    except OSError:
        return False
    caught = int(_field(each.pid, "SigCgt:") or "0", 16)
    return bool(caught >> (_NUMBER - 1) & 1)


def _has_answered(each: Recording) -> bool:
    try:
        text = _stacks_text(each, is_own=True)
    except OSError:
        return True
    # A process whose Python lock is kept writes no table.
    return thread_stacks.has_table(text)
