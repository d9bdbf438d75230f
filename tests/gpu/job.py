"""Execution of one step of ``make gpu``: its process, its log, and what came of it.

A job of tests that hung or crashed is started again for the tests behind: one of them hides no
other. Each process is ended by ``timeout`` from coreutils, also if this one is killed first.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.machine import ROOT, Machine
from tests.gpu.plan import CUT_SHORT, FAILED, OK, TIMED_OUT
from tests.gpu.steps import Step

SKIPPED = "skipped"
_STATUSES = {0: OK, 77: SKIPPED, 124: TIMED_OUT, 137: TIMED_OUT, -9: TIMED_OUT}
_NO_TEST_LEFT = 5  # pytest's status
_AGAIN_S = 15  # time left with which a job is started again
_BROKEN = re.compile(r"^Timeout \(|Fatal Python error|on signal [0-9]", re.MULTILINE)
_LAST_WORDS = re.compile(
    r"[0-9]+ (passed|failed|errors?|skipped|tests? collected)\b|ERROR SUMMARY|RACECHECK SUMMARY"
    r"|^written to|operations work|: skipped,"
)
_MOST_FAILURES = 20


@dataclass(frozen=True)
class Outcome:
    """Result of a step.

    Attributes:
        outcome: One of ``plan``'s, or SKIPPED.
        seconds: Time that it took.
        words: Exit status and the last line that says something.
        failures: Tests that failed, hung or crashed.
    """

    outcome: str
    seconds: float
    words: str
    failures: tuple[str, ...] = ()


class Job:
    """A step under way: one process after the other, until no test is left."""

    def __init__(self, step: Step, found: Machine, limit_s: float) -> None:
        self.step = step
        self._found = found
        self._begin = time.monotonic()
        self._until = self._begin + limit_s
        self._status: int | None = None
        self._lost: list[str] = []
        base = found.work / step.name.replace("/", "-")
        self.log = Path(f"{base}.log")
        self._begun, self._done = Path(f"{base}.begun"), Path(f"{base}.done")
        self.log.touch()
        self._done.touch()
        self._start()

    def _start(self) -> None:
        self._begun.write_bytes(b"")
        self._part_begin = self.log.stat().st_size
        left_s = max(self._until - time.monotonic(), 1)
        tests = {
            "MPIDIST_TESTS_BEGUN": str(self._begun),
            "MPIDIST_TESTS_DONE": str(self._done),
        }
        with self.log.open("ab") as log:
            # A launcher that is asked to end ends its ranks.
            self.process = subprocess.Popen(
                ["timeout", "-k", "5", f"{left_s:.1f}", *self.step.command],
                cwd=ROOT,
                env={**self._found.environ, **self.step.env, **tests},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ended(self) -> Outcome | None:
        """Return the result after a process has ended; None if the next has been started."""
        status = self.process.wait()
        if self._status is None or status not in (0, _NO_TEST_LEFT):
            self._status = status
        with self._done.open("ab") as done:
            done.write(self._begun.read_bytes())
        begun = self._begun.read_text(encoding="utf-8").splitlines()
        if begun and _BROKEN.search(self._part()):
            self._lost.append(f"ended in {begun[-1]}")
            if self._until - time.monotonic() > _AGAIN_S:
                self._start()
                return None
        return self._outcome(_STATUSES.get(self._status, FAILED))

    def cut_short(self) -> Outcome:
        """Return the result of a job that this process is about to end."""
        return self._outcome(CUT_SHORT)

    def _part(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._part_begin)
            return log.read().decode(errors="replace")

    def _outcome(self, outcome: str) -> Outcome:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if _LAST_WORDS.search(line)), "")
        failed = sorted({line for line in lines if " failed in " in line})[:_MOST_FAILURES]
        status = "" if self._status is None else f"status {self._status}  "
        return Outcome(
            outcome,
            time.monotonic() - self._begin,
            f"{status}{last.strip('= ')}",
            () if outcome in (OK, SKIPPED) else (*failed, *self._lost),
        )
