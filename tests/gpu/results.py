"""Folder of what a run of ``make gpu`` found; it is complete after each step.

``summary.txt`` has a line for each step, ``logs.txt`` their output in the order in which they
ended, ``steps.json`` the record for the next call, ``records.tar.gz`` the benchmarks' JSON and
plots. A few files: borrowed machines send no more than that back.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.gpu import record
from tests.gpu.job import SKIPPED, Job, Outcome
from tests.gpu.machine import ROOT, Settings
from tests.gpu.plan import OK, Past

# Of a log: all of them together must stay below what a borrowed machine sends back.
_TAIL_BYTES = {OK: 50_000, SKIPPED: 50_000}
_TAIL_OF_FAILURE_BYTES = 500_000


class Results:
    """Writer of the folder and of the record."""

    def __init__(self, chosen: Settings, work: Path, begin: float) -> None:
        """Empty the folder of an earlier run.

        Raises:
            ValueError: The record of the last runs is none.
        """
        self._chosen = chosen
        self._made = work / "results"
        self._begin = begin
        self._told: dict[str, str] = {}
        self.failed: set[str] = set()
        self._running: set[str] = set()
        self._waiting: dict[str, None] = {}
        self.about = ""
        self.plan = ""
        self._made.mkdir()
        chosen.out.mkdir(parents=True, exist_ok=True)
        self._own = record.past(record.read(chosen.last), device=chosen.device)
        self.past = {
            **record.past(record.read(record.KNOWN), device=chosen.device),
            **self._own,
        }
        self._call = 1 + max((run.call for run in self.past.values()), default=0)
        (chosen.out / "logs.txt").write_bytes(b"")

    def expects(self, names: Iterable[str]) -> None:
        """Note steps that are to run; a summary names those that did not come to it."""
        self._waiting.update(dict.fromkeys(names))
        self.write_summary()

    def begins(self, name: str) -> None:
        self._waiting.pop(name, None)
        self._running.add(name)
        self.write_summary()

    def ends(self, job: Job, outcome: Outcome) -> None:
        """Tell a result, and write all that is known."""
        name = job.step.name
        self._running.discard(name)
        self.tell(
            name,
            f"{outcome.outcome:<9} {outcome.seconds:4.0f} s  {outcome.words}".rstrip(),
            is_failure=outcome.outcome not in (OK, SKIPPED),
            failures=outcome.failures,
        )
        self._append_log(job, outcome)
        self._take_records()
        # A step that was skipped has shown nothing.
        if outcome.outcome != SKIPPED:
            last = self.past.get(name, Past())
            run = record.updated(last, outcome.outcome, outcome.seconds, self._call)
            self._own[name] = self.past[name] = run
            record.write(self._chosen.last, self._chosen.device, self._own)
            if self._chosen.last != self._chosen.out / "steps.json":
                shutil.copyfile(self._chosen.last, self._chosen.out / "steps.json")

    def tell(self, name: str, text: str, *, is_failure: bool, failures: Iterable[str] = ()) -> None:
        """Print a line of the summary as soon as it is known, and keep it."""
        lines = "\n    ".join((f"{name:<32} {text}", *failures))
        print(lines, flush=True)
        self._told[name] = lines
        self.failed.discard(name)
        if is_failure:
            self.failed.add(name)
        self.write_summary()

    def write_summary(self) -> None:
        lines = [self.about, *filter(None, [self.plan]), *self._told.values()]
        lines += [f"{name:<32} UNKNOWN   it has not ended" for name in sorted(self._running)]
        lines.append(self.verdict())
        part = self._chosen.out / "summary.txt.part"
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(part, self._chosen.out / "summary.txt")

    def verdict(self) -> str:
        """Return the last lines of the summary: the steps that were not run, and the counts."""
        lines = [
            f"{name:<32} NOT RUN   it takes about {self.past.get(name, Past()).seconds:.0f} s"
            for name in self._waiting
        ]
        failed, steps = len(self.failed | self._running), len(self._told) + len(self._running)
        not_run = f", {len(self._waiting)} not run" if self._waiting else ""
        seconds = time.monotonic() - self._begin
        lines.append(f"{failed} of {steps} steps failed{not_run}; {seconds:.0f} s")
        return "\n".join(lines)

    @property
    def is_good(self) -> bool:
        return not self.failed and not self._running

    def _append_log(self, job: Job, outcome: Outcome) -> None:
        most = _TAIL_BYTES.get(outcome.outcome, _TAIL_OF_FAILURE_BYTES)
        with job.log.open("rb") as log:
            log.seek(max(0, job.log.stat().st_size - most))
            tail = log.read()
        with (self._chosen.out / "logs.txt").open("ab") as logs:
            logs.write(b"\n===== %s\n" % job.step.name.encode() + tail)

    def _take_records(self) -> None:
        made = sorted(self._made.iterdir())
        if not made:
            return
        part = self._chosen.out / "records.tar.gz.part"
        with tarfile.open(part, "w:gz") as archive:
            for path in made:
                archive.add(path, path.name)
        os.replace(part, self._chosen.out / "records.tar.gz")
        if self._chosen.records:
            for path in made:
                shutil.copy(path, ROOT / "benchmarks" / "results")
