"""Restarts of a job: its ranks are started again after a failure, if they have saved since.

The ranks note each commit and checkpoint in a file (``mpidist.checkpoint.progress``). The job has
one name for all of its starts, by which new ranks find the commits in the memory of their node.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from mpidist.checkpoint import progress
from mpidist.cli import launcher_watch
from mpidist.cli.launch_plan import Plan, plan
from mpidist.cli.launch_request import Request, has_children
from mpidist.cli.run import site, text_of
from mpidist.comm.mpi import launcher_env
from mpidist.errors import LaunchError

_JOB = "MPIDIST_JOB"
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Of a launcher whose ranks a signal has ended, whatever the signal (Open MPI's mpirun).
_LAUNCHERS_STATUS = 1
_KILLED = 128  # and the signal's number: a shell's status of a killed program


def run(request: Request, most: int, is_dry: bool) -> int:
    """Start a job, and up to ``most`` times again; return its exit status.

    Blocks: until the job has ended.

    Raises:
        LaunchError: The request cannot be carried out.
    """
    with tempfile.TemporaryDirectory(prefix="mpidist-run-") as folder:
        own = {progress.VARIABLE: os.environ.get(progress.VARIABLE) or f"{folder}/progress"}
        if not launcher_env.has_job_name(os.environ):
            own[_JOB] = f"run-{socket.gethostname()}-{os.getpid()}-{os.path.basename(folder)[-8:]}"
        environ = {**os.environ, **own}
        planned = plan(request, site(environ), environ)
        if is_dry:
            print(text_of(Plan(planned.argv, {**own, **planned.variables})))
            return 0
        for note in planned.notes:
            _say(note)
        command = planned.argv, {**environ, **planned.variables}
        path = Path(own[progress.VARIABLE])
        is_watched = request.ulfm and has_children(request, environ)
        return _Starts(*command, path, most, is_watched).run()


def next_step(status: int, before: int, now: int, starts: int, most: int) -> tuple[bool, str]:
    """Return whether a job that has ended is started again, and what to tell the user. Pure.

    Args:
        status: Its exit status.
        before: The highest step that was saved before its last start; -1 for none.
        now: The highest step that is saved.
        starts: Number of its starts.
        most: Number of restarts.
    """
    if status in (0, progress.REQUEUE_EXIT_CODE):
        return False, ""
    ended = f"the job ended with status {status}"
    if now <= before:
        return False, (
            f"{ended}, and no commit or checkpoint is newer than its last start: it is not started "
            "again"
        )
    if starts > most:
        return False, f"{ended} after step {now}; it was started {starts} times, the most"
    return True, f"{ended} after step {now}: start {starts + 1} of at most {most + 1}"


class _Starts:
    """Starts of one job, with this process's signals forwarded to its launcher.

    Args:
        argv: Command line of the launcher.
        environ: Its environment.
        path: File of the job's progress.
        most: Number of restarts.
        is_watched: The launcher may stay when its ranks are gone.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        path: Path,
        most: int,
        is_watched: bool = False,
    ) -> None:
        self._argv = list(argv)
        self._environ = dict(environ)
        self._path = path
        self._most = most
        self._is_watched = is_watched
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ended_by = 0  # number of the signal

    def run(self) -> int:
        """Start the job until it is not to be started again; return the last exit status.

        After a signal it is a shell's (130 for Ctrl-C), unless the job ended with one of its own.
        """
        former = {
            number: signal.signal(number, self._forward) for number in (*_ENDING, *_FORWARDED)
        }
        try:
            starts = 0
            while True:
                before, starts = progress.read(self._path), starts + 1
                status = self._ended()
                goes_on, text = next_step(
                    status, before, progress.read(self._path), starts, self._most
                )
                if self._ended_by:
                    return _KILLED + self._ended_by if status == _LAUNCHERS_STATUS else status
                if text:
                    _say(text)
                if not goes_on:
                    return status
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _ended(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._launcher = subprocess.Popen(self._argv, env=self._environ)
        except OSError as error:
            raise LaunchError(f"{self._argv[0]} does not start: {error}") from error
        if self._is_watched:
            launcher_watch.start(self._launcher.pid)
        if self._ended_by:
            # The signal came while the launcher was started, and has reached nobody.
            self._launcher.send_signal(self._ended_by)
        status = self._launcher.wait()
        return status if status >= 0 else _KILLED - status

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            self._ended_by = self._ended_by or number
        # A terminal's Ctrl-C reaches the launcher, too.
        if self._launcher is not None and not (number == signal.SIGINT and sys.stdin.isatty()):
            self._launcher.send_signal(number)


def _say(text: str) -> None:
    print(f"mpidist run: {text}", file=sys.stderr, flush=True)
