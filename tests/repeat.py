"""Repeated runs beside busy processes, of tests that have failed by a race and of all MPI stages.

``python -m tests.repeat``, or ``make repeat``. Each outcome becomes a line of JSON in a file that
belongs to the repository, with the commit that was run; a later call reads the file and goes on
where the earlier was ended, on another day and another machine too. Named tests run several times
in one launch (pytest-repeat), since starting the ranks takes longer than most of them. The case
that lacks most comes next, so that a call that is ended early has done about as much of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAILURES = ROOT / "repeat-results"
STAGES = ("mpi-1", "mpi-2", "mpi-3", "mpi-4", "mpich-2", "mpich-3")
# Target of make and its tests: what another rank's step, message or answer has made fail.
TESTS = (
    ("mpi-4", "tests/nn/test_data_only.py -k Halving"),
    ("mpi-4", "tests/optim/test_distributed_optimizer.py -k trainers_steps"),
    ("mpi-4", "tests/rpc/threads/test_interceptor.py"),
    ("mpich-2", "tests/rpc/threads/test_interceptor.py"),
    ("mpi-3", "tests/rpc/test_api.py tests/rpc/serving/test_dispatcher.py"),
    ("mpi-3", "tests/comm/watchdog tests/comm/store"),
    ("mpi-3", "tests/comm/test_objects.py tests/comm/messages"),
    ("mpi-3", "tests/autograd/test_context.py tests/autograd/test_api.py"),
)
_AT_ONCE = 10  # runs of named tests in one launch
_OUTPUT = 20_000  # characters of a failure that are printed: its end

# A process ends by itself when the one that started it is gone.
_BUSY = "import os; p = os.getppid()\nwhile os.getppid() == p: sum(range(10**6))"


@dataclass(frozen=True)
class Case:
    """A target of make, run a number of times; ``tests``: within them, or all for nothing."""

    stage: str
    tests: str
    times: int

    @property
    def name(self) -> str:
        return f"{self.stage} {self.tests}".strip()


def cases(times: int, stage_times: int) -> list[Case]:
    return [Case(stage, tests, times) for stage, tests in TESTS] + [
        Case(stage, "", stage_times) for stage in STAGES
    ]


def outcomes(path: Path) -> list[dict[str, Any]]:
    """Read the outcomes of earlier calls, without a last line that was cut off."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def keep(folder: Path, name: str, output: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(output, encoding="utf-8")


def commit_of_tree() -> str:
    """Return the short name of the commit that is checked out; "" outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def append(path: Path, outcome: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        is_cut = file.tell() > 0 and path.read_bytes()[-1:] != b"\n"
        file.write(b"\n" * is_cut + json.dumps(outcome).encode() + b"\n")


def runs_of(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return how often each case has run."""
    done: dict[str, int] = {}
    for outcome in found:
        done[outcome["name"]] = done.get(outcome["name"], 0) + outcome.get("runs", 1)
    return done


def run(
    wanted: Sequence[Case],
    path: Path,
    execute: Callable[[Case, int, int], tuple[int, str]],
    until: float = float("inf"),
    commit: str = "",
    failures: Path = FAILURES,
    at_once: int = _AT_ONCE,
) -> None:
    """Run what the file lacks until a monotonic time; ``execute`` gets case, turn and runs.

    The outputs of failures are files of a folder: they name paths of the machine.
    """
    done = runs_of(outcomes(path))
    while True:
        lacking = [case for case in wanted if done.get(case.name, 0) < case.times]
        if not lacking or time.monotonic() > until:
            return
        case = min(lacking, key=lambda case: done.get(case.name, 0) / case.times)
        turn = done.get(case.name, 0)
        runs = min(at_once, case.times - turn) if case.tests else 1
        begin = time.monotonic()
        status, output = execute(case, turn, runs)
        append(
            path,
            {
                "name": case.name,
                "turn": turn,
                "runs": runs,
                "status": status,
                "seconds": round(time.monotonic() - begin, 1),
                "commit": commit,
            },
        )
        if status:
            keep(failures, f"{case.stage}-{turn}-{wanted.index(case)}.txt", output)
        done[case.name] = turn + runs


def table(wanted: Sequence[Case], found: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """Return the table of all cases, and the number of launches that failed."""
    lines = [f"{'runs':>7}{'failed':>7}{'wanted':>7}{'longest':>9}  case"]
    runs, failures = runs_of(found), 0
    for case in wanted:
        own = [outcome for outcome in found if outcome["name"] == case.name]
        failed = sum(outcome["status"] != 0 for outcome in own)
        longest = max((outcome["seconds"] for outcome in own), default=0.0)
        lines.append(
            f"{runs.get(case.name, 0):>7}{failed:>7}{case.times:>7}{longest:>7.0f} s  {case.name}"
        )
        failures += failed
    return "\n".join(lines), failures


def made(make: Sequence[str]) -> Callable[[Case, int, int], tuple[int, str]]:
    """Return the execution by make: the named tests with a late rank, another one at each run."""

    def execute(case: Case, turn: int, runs: int) -> tuple[int, str]:
        # Named tests run at this number of ranks, whichever they are dealt to otherwise.
        named = f"TESTS=-p tests.tools.late_rank --count {runs} {case.tests}"
        print(f"{turn} of {case.times} runs: {case.name}", flush=True)
        done = subprocess.run(
            [*make, case.stage, *(["ALTERNATE=", named] if case.tests else [])],
            cwd=ROOT,
            env={**os.environ, "MPIDIST_TESTS_LATE": str(turn)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            print(done.stdout[-_OUTPUT:], flush=True)
        return done.returncode, done.stdout

    return execute


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep processes busy beside the block; return them."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100, help="runs of each named test")
    parser.add_argument("--stage-times", type=int, default=5, help="runs of each MPI stage")
    parser.add_argument("--only", default="", help="the cases whose name has this text")
    parser.add_argument("--at-once", type=int, default=_AT_ONCE, help="runs in one launch")
    parser.add_argument("--busy", type=int, default=2, help="busy processes beside the runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run later")
    parser.add_argument("--make", default="make ALTERNATE=--alternate", help="the command of make")
    parser.add_argument("--record", type=Path, default=ROOT / "tests" / "repeat.jsonl")
    options = parser.parse_args(words)
    wanted = [
        case for case in cases(options.times, options.stage_times) if options.only in case.name
    ]
    try:
        with busy(options.busy):
            run(
                wanted,
                options.record,
                made(shlex.split(options.make)),
                time.monotonic() + 60 * options.minutes,
                commit_of_tree(),
                at_once=options.at_once,
            )
    except KeyboardInterrupt:
        print("ended; the next call goes on here", flush=True)
    text, failures = table(wanted, outcomes(options.record))
    print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
