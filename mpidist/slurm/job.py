"""Submitted job: its state, its end, its log.

``scontrol`` has a job until some minutes after its end, and the accounting, where the site keeps
one, from then on. A job array is one job: it has ended when all of its tasks have.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from mpidist.errors import CommTimeout, LaunchError

# States of a job that will not run again, squeue(1).
ENDED = (
    "COMPLETED",
    "BOOT_FAIL",
    "CANCELLED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)
UNKNOWN = "UNKNOWN"
_COMMAND_S = 60.0
# In the lines of ``scontrol show job``. A path has a line of its own, and may have spaces.
_TASK = re.compile(r"^JobId=(\S+)(.*?)(?=^JobId=|\Z)", re.MULTILINE | re.DOTALL)
_STATE, _STDOUT, _STDERR = (
    re.compile(rf"^\s*{name}={value}", re.MULTILINE)
    for name, value in (("JobState", r"(\S+)"), ("StdOut", "(.*)"), ("StdErr", "(.*)"))
)


class Job:
    """A job by its number, also one of another process: ``Job("4711")``.

    Attributes:
        id: Number of the job, as Slurm's commands take it.
    """

    def __init__(self, id: str | int) -> None:
        self.id = str(id)
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", self.id):
            raise ValueError(f"a job is named by its number, as 4711 or 4711_3; got {self.id!r}")
        # By task: scontrol forgets a job, and its files stay.
        self._outputs: dict[str, tuple[str, str]] = {}

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    @property
    def state(self) -> str:
        """State in Slurm's words: ``"PENDING"``, ``"RUNNING"``, ``"COMPLETED"``, ``"FAILED"``.

        Of an array the state of a task that has not ended, else of one that has failed. A requeued
        job is pending again. ``"UNKNOWN"`` if Slurm knows the job no more.

        Raises:
            LaunchError: Slurm's commands are missing, or do not answer.
        """
        states = self._states()
        going = [state for state in states if state not in ENDED]
        failed = [state for state in states if state != "COMPLETED"]
        return next(iter([*going, *failed, *states]), UNKNOWN)

    def done(self) -> bool:
        """Return whether the job has ended and will not run again."""
        return self.state in (*ENDED, UNKNOWN)

    def wait(self, timeout: float | None = None, poll_s: float = 5.0) -> str:
        """Wait for the end of the job, also through requeues; return its last state.

        Blocks: until then. Slurm is asked every ``poll_s`` seconds.

        Args:
            timeout: Limit in seconds; None for none.
            poll_s: Seconds between two questions.

        Raises:
            CommTimeout: The job had not ended within ``timeout``; it goes on. A ``TimeoutError``.
            LaunchError: See ``state``.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (state := self.state) not in (*ENDED, UNKNOWN):
            left = poll_s if end is None else end - time.monotonic()
            if left <= 0:
                raise CommTimeout(f"job {self.id} has not ended after {timeout:g} s: {state}")
            time.sleep(min(poll_s, left))
        return state

    def cancel(self) -> None:
        """Cancel the job; one that has ended is left as it is.

        Raises:
            LaunchError: scancel is missing, or refuses.
        """
        done = _run("scancel", self.id)
        if done.returncode != 0:
            raise LaunchError(f"scancel {self.id}: {' '.join(done.stderr.split())}")

    def stdout(self) -> str:
        """Return what the job has written so far, of all tasks of an array; "" before its start."""
        return self._text(0)

    def stderr(self) -> str:
        """Return what the job has written to stderr; the shipped scripts have one file for both."""
        return self._text(1)

    def paths(self) -> list[Path]:
        """Return the paths of the job's log, one for each task of an array.

        Raises:
            LaunchError: See ``state``.
        """
        self._states()
        return [Path(output) for output, _ in self._outputs.values()]

    def _text(self, which: int) -> str:
        self._states()
        paths = [Path(outputs[which]) for outputs in self._outputs.values()]
        return "".join(
            path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()
        )

    def _states(self) -> list[str]:
        """Return the states of the job's tasks; empty if Slurm knows the job no more."""
        shown = _run("scontrol", "show", "job", self.id)
        states = []
        for task, text in _TASK.findall(shown.stdout):
            state, output, error = (one.search(text) for one in (_STATE, _STDOUT, _STDERR))
            states += [state[1]] if state else []
            # Tasks that have not begun have the file of none.
            if output and output[1] and not re.search(r"%|4294967294", output[1]):
                self._outputs[task] = (output[1], error[1] if error and error[1] else output[1])
        if states:
            return states
        if shown.returncode == 0 or "nvalid job id" not in shown.stderr:
            raise LaunchError(
                f"scontrol show job {self.id} ended with {shown.returncode}: "
                f"{' '.join(shown.stderr.split()) or 'no answer'}"
            )
        if shutil.which("sacct") is None:
            return []
        kept = _run("sacct", "-X", "-n", "-P", "-j", self.id, "-o", "State")
        # "CANCELLED by 1000"
        return [line.split()[0] for line in kept.stdout.splitlines() if line.strip()]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands.

    Raises:
        LaunchError: It is missing, or did not answer.
    """
    try:
        return subprocess.run(
            words,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_COMMAND_S,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{words[0]} was not found: a login node of a Slurm cluster has it"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{words[0]} did not answer within {_COMMAND_S:g} s") from None
