"""Time the recovery from a rank's death: a spare, a restart, and torchrun's restart over Gloo.

python benchmarks/bench_recovery.py           (without mpirun: it starts the jobs itself)

Three ranks train, and a drawn one is killed at a drawn time, several times in a job. mpidist has a
spare process for each death, and commits in memory; ``mpidist run --restarts`` starts all ranks
again, from the same commits, and torchrun from a checkpoint on the disk. All keep their state every
five steps, and the jobs take turns. Then calls are timed with ULFM switched on and off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness import benchmark_options, environment, report, tables

_JOB = Path(__file__).with_name("recovery") / "job.py"
_RANKS = 3
_DEATHS = {"mpidist": 3, "restarts": 2, "gloo": 4}  # of one job
_STEPS_BEFORE = 12  # of the victim since the death before, the least
_MOST_BEFORE_S = 0.5  # of the drawn time before a death
_LIMIT_S = 120.0
_LOOK_S = 2e-3
_TIMES = {
    "error_s": "to the last error",
    "step_s": "to the first new step",
    "cold_s": "from a cold start to the first step",
}

T = TypeVar("T")


def main() -> None:
    options = _parsed()
    rng = random.Random(options.seed)
    kinds = ["mpidist"] if options.quick else list(_DEATHS)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    # The one death of --quick only shows that the jobs run.
    due = {kind: options.restarts for kind in kinds} | {"mpidist": options.rounds}
    if options.quick:
        due = {"mpidist": 1}
    while any(due.values()):
        for kind in kinds:
            if deaths := min(due[kind], _DEATHS[kind]):
                found[kind] += _killed(kind, deaths, rng)
                due[kind] -= deaths
    rows = [
        (f"{kind}: {name}", *_summary([one[key] for one in times]))
        for kind, times in found.items()
        for key, name in _TIMES.items()
        if all(key in one for one in times)
    ]
    print(tables.text(rows, ["death", "median s", "worst s"], floats=".3f"))
    record: dict[str, Any] = {
        "environment": {
            "processor": environment.cpu_model(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "ranks": _RANKS,
        "deaths_of_a_job": _DEATHS,
        "seconds": found,
    }
    if not options.quick:
        ratio = _median(found["mpidist"], "step_s") / _median(found["gloo"], "step_s")
        record["step_of_torchruns"] = ratio
        print(f"\nto the first new step, of torchrun's: {ratio:.3f}\n")
        restarts = found["restarts"]
        record["restart_of_cold_start"] = statistics.median(
            one["step_s"] / one["cold_s"] for one in restarts
        )
        print(f"a restart, of a cold start: {record['restart_of_cold_start']:.3f}\n")
        record["calls_us"] = calls = _calls(options.restarts)
        print(
            tables.text(
                [(name, on, off, on / off) for name, (on, off) in calls.items()],
                ["call", "with --ft, us", "without", "ratio"],
                floats=".3g",
            )
        )
    report.write_json(record, options.output / "recovery-openmpi.json")


def _parsed() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "quick")
    parser.add_argument("--rounds", type=int, default=20, help="deaths with a spare")
    parser.add_argument("--restarts", type=int, default=5, help="deaths of the other two kinds")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and times")
    return parser.parse_args()


def _summary(seconds: list[float]) -> tuple[float, float]:
    return statistics.median(seconds), max(seconds)


def _median(rounds: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in rounds)


def _mpirun(ranks: int, *options: str) -> list[str]:
    here = Path(sys.executable).parent
    return [str(here / "mpirun"), "--oversubscribe", *options, "-n", str(ranks), sys.executable]


def _command(kind: str, deaths: int) -> list[str]:
    if kind == "mpidist":
        return _mpirun(_RANKS + deaths, "--with-ft", "ulfm", "-x", f"MPIDIST_SPARES={deaths}")
    if kind == "restarts":
        run = [sys.executable, "-m", "mpidist", "run", f"--restarts={deaths}", "-n", str(_RANKS)]
        return [*run, "--bind-to", "none"]
    torchrun = Path(sys.executable).with_name("torchrun")
    return [str(torchrun), "--standalone", f"--nproc-per-node={_RANKS}", f"--max-restarts={deaths}"]


class _Events:
    """Events that the processes of a job have written so far, each line read once.

    Args:
        folder: Of their files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of each file
        self._rows: list[dict[str, Any]] = []

    def since(self, at: float) -> list[dict[str, Any]]:
        """Return the events after a time, in their order; the others are forgotten."""
        for file in self._folder.glob("events-*"):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                whole = lines.read().rpartition(b"\n")[0]
            if whole:
                self._read[file] = self._read.get(file, 0) + len(whole) + 1
                self._rows += map(json.loads, whole.splitlines())
        rows = (row for row in self._rows if row["at"] > at)
        self._rows = sorted(rows, key=lambda row: row["at"])
        return self._rows


def _killed(kind: str, deaths: int, rng: random.Random) -> list[dict[str, float]]:
    """Return the seconds from each death of a rank to what follows, in one job."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = _Events(folder)
        command = [*_command(kind, deaths), str(_JOB), kind, name]
        at = launched = time.time()
        job = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            first = _wait(job, lambda: _after(events, launched))
            cold_s = max(first["step"].values()) - launched
            if kind == "mpidist":
                _wait(job, lambda: _are_warm(events, launched, deaths))
            for _ in range(deaths):
                rank = rng.randrange(_RANKS)
                pid = _wait(job, lambda: _pid_after(events, rank, at))  # noqa: B023
                time.sleep(_MOST_BEFORE_S * rng.random())
                at = time.time()
                os.kill(pid, signal.SIGKILL)
                seen = _wait(job, lambda: _after(events, at))  # noqa: B023
                times = {"step_s": max(seen["step"].values()) - at}
                if seen["error"]:
                    times["error_s"] = max(seen["error"].values()) - at
                if kind == "restarts":
                    times["cold_s"] = cold_s
                found.append(times)
            (folder / "end").touch()
            _, err = job.communicate(timeout=_LIMIT_S)
        finally:
            job.kill()
    if job.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{err}")
    return found


def _wait(job: subprocess.Popen[str], look: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + _LIMIT_S
    while (found := look()) is None:
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a job has not come to its steps: {job.communicate()[1]}")
        time.sleep(_LOOK_S)
    return found


def _are_warm(events: _Events, at: float, spares: int) -> bool | None:
    """Return whether so many spares have imported what torch delays; None if not."""
    return sum(row["kind"] == "warm" for row in events.since(at)) == spares or None


def _pid_after(events: _Events, rank: int, at: float) -> int | None:
    """Return the process of a rank that has made its first steps since a time."""
    steps = [row for row in events.since(at) if row["rank"] == rank and row["kind"] == "step"]
    # Steps that are made again after a death are the survivors' from the commit on.
    pid: int = steps[-1]["pid"] if steps else 0
    return pid if sum(row["pid"] == pid for row in steps) >= _STEPS_BEFORE else None


def _after(events: _Events, died: float) -> dict[str, dict[int, float]] | None:
    """Return times by rank of the first new step, and of errors, once all ranks have made it."""
    rows = events.since(died)
    begun = {row["rank"]: row["at"] for row in rows if row["kind"] == "begin"}
    found: dict[str, dict[int, float]] = {"step": {}, "error": {}}
    for row in rows:
        rank, at = row["rank"], row["at"]
        if row["kind"] == "error":
            found["error"].setdefault(rank, at)
        elif row["kind"] == "step" and at > begun.get(rank, at):
            found["step"].setdefault(rank, at)
    return found if len(found["step"]) == _RANKS else None


def _calls(rounds: int) -> dict[str, tuple[float, float]]:
    """Return the microseconds of each call with ULFM and without; the kinds take turns."""
    medians: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(rounds):
        for is_on in medians:
            with tempfile.TemporaryDirectory() as name:
                options = ("--with-ft", "ulfm") if is_on else ()
                command = [*_mpirun(2, "--bind-to", "none", *options), str(_JOB), "calls", name]
                subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)
                medians[is_on].append(json.loads(Path(name, "calls").read_text()))
    return {
        name: (_median(medians[True], name), _median(medians[False], name))
        for name in medians[True][0]
    }


if __name__ == "__main__":
    main()
