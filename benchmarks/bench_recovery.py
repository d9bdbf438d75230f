"""Time the recovery from a rank's death: a spare, a restart, and torchrun's restart over Gloo.

python benchmarks/bench_recovery.py           (without mpirun: it starts the jobs itself)

Three ranks train, and a drawn one is killed at a drawn time. mpidist has one spare process and
commits in memory; ``mpidist run --restarts`` starts all ranks again, from the same commits, and
torchrun from a checkpoint on the disk. All keep their state every five steps, and take turns. Then
calls are timed with ULFM switched on and off.
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
from pathlib import Path
from typing import Any

import torch

from harness import benchmark_options, environment, report, tables

_JOB = Path(__file__).with_name("recovery") / "job.py"
_RANKS = 3
_STEPS_BEFORE = 12  # of the victim, the least
_LIMIT_S = 120.0
_LOOK_S = 2e-3
_TIMES = {
    "error_s": "to the last error",
    "step_s": "to the first new step",
    "cold_s": "from a cold start to the first step",
}


def main() -> None:
    options = _parsed()
    rng = random.Random(options.seed)
    kinds = ["mpidist"] if options.quick else ["mpidist", "restarts", "gloo"]
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    # The one round of --quick only shows that the jobs run.
    rounds = 1 if options.quick else options.rounds
    for number in range(rounds):
        for kind in kinds:
            # The slower kinds have a turn in a few rounds, evenly among them.
            if kind == "mpidist" or number * options.restarts % rounds < options.restarts:
                found[kind].append(_killed(kind, rng))
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="deaths with a spare")
    parser.add_argument("--restarts", type=int, default=5, help="deaths of the other two kinds")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and times")
    benchmark_options.add_quick(parser)
    benchmark_options.add_output(parser)
    return parser.parse_args()


def _summary(seconds: list[float]) -> tuple[float, float]:
    return statistics.median(seconds), max(seconds)


def _median(rounds: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in rounds)


def _mpirun(ranks: int, *options: str) -> list[str]:
    here = Path(sys.executable).parent
    return [str(here / "mpirun"), "--oversubscribe", *options, "-n", str(ranks), sys.executable]


def _command(kind: str) -> list[str]:
    if kind == "mpidist":
        return _mpirun(_RANKS + 1, "--with-ft", "ulfm", "-x", "MPIDIST_SPARES=1")
    if kind == "restarts":
        run = [sys.executable, "-m", "mpidist", "run", "--restarts", "1", "-n", str(_RANKS)]
        return [*run, "--bind-to", "none"]
    torchrun = Path(sys.executable).with_name("torchrun")
    return [str(torchrun), "--standalone", f"--nproc-per-node={_RANKS}", "--max-restarts=1"]


def _killed(kind: str, rng: random.Random) -> dict[str, float]:
    """Return the seconds from the death of a rank to what follows, in one job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [*_command(kind), str(_JOB), kind, name]
        launched = time.time()
        job = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            deadline = time.monotonic() + _LIMIT_S
            rank = rng.randrange(_RANKS)
            pid = _wait(job, deadline, lambda: _pid_after(folder, rank))
            # A spare may still import what torch delays.
            time.sleep(4.0 + 0.1 * rng.random())
            first = _after(folder, launched)
            assert first is not None
            died = time.time()
            os.kill(pid, signal.SIGKILL)
            events = _wait(job, deadline, lambda: _after(folder, died))
            (folder / "end").touch()
            _, err = job.communicate(timeout=_LIMIT_S)
        finally:
            job.kill()
    if job.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{err}")
    times = {"step_s": max(events["step"].values()) - died}
    if events["error"]:
        times["error_s"] = max(events["error"].values()) - died
    if kind == "restarts":
        times["cold_s"] = max(first["step"].values()) - launched
    return times


def _wait(job: subprocess.Popen[str], deadline: float, look: Any) -> Any:
    while (found := look()) is None:
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a job has not come to its steps: {job.communicate()[1]}")
        time.sleep(_LOOK_S)
    return found


def _events(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in folder.glob("events-*")
        for line in file.read_text().splitlines()
        if line.endswith("}")
    ]


def _pid_after(folder: Path, rank: int) -> int | None:
    """Return the process of a rank that has made its first steps."""
    for event in _events(folder):
        if event["rank"] == rank and event["step"] >= _STEPS_BEFORE:
            pid: int = event["pid"]
            return pid
    return None


def _after(folder: Path, died: float) -> dict[str, dict[int, float]] | None:
    """Return times by rank of the first new step, and of errors, once all ranks have made it."""
    events = sorted(_events(folder), key=lambda event: event["at"])
    begun = {event["rank"]: event["at"] for event in events if event["kind"] == "begin"}
    found: dict[str, dict[int, float]] = {"step": {}, "error": {}}
    for event in events:
        rank, at = event["rank"], event["at"]
        if event["kind"] == "error" and at > died:
            found["error"].setdefault(rank, at)
        elif event["kind"] == "step" and begun.get(rank, 0.0) > died and at > begun[rank]:
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
