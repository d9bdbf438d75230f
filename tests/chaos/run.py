"""Chaos: one training whose processes are killed at drawn times, against the undisturbed one."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.comm.mpi import job_folder
from mpidist.comm.mpi.launcher_env import without_launcher
from tests.elastic.training import KINDS, Steps
from tests.tools.support import END_S, ROOT, VARIABLES, launcher, python

STEPS = 60
_LIMIT_S = 90.0
_LIMIT_OF_RECOVERY_S = 20.0
_PAUSE_S = 0.3
_MORE_FILES = 4  # of node memory that the collector has yet to free


@dataclass(frozen=True)
class Blow:
    """Signal from outside.

    Attributes:
        rank: The rank that it hits.
        step: Steps of this process before it.
        delay_s: Seconds behind the begin of the following step.
        is_pause: The process is stopped for a while; else it is killed.
    """

    rank: int
    step: int
    delay_s: float
    is_pause: bool = False

    def __str__(self) -> str:
        word = "pause" if self.is_pause else "kill"
        return f"{word} of rank {self.rank} at {self.step} + {self.delay_s:.4f} s"


@dataclass(frozen=True)
class Case:
    """One training and its deaths.

    Attributes:
        seed: Draws the rest.
        kind: Of the training.
        ranks: Number of ranks.
        spares: Number of spares.
        blows: What hits its ranks, one after the other.
        steps: Of the training.
    """

    seed: int
    kind: str
    ranks: int
    spares: int
    blows: tuple[Blow, ...]
    steps: int = STEPS


def drawn(seed: int, kinds: tuple[str, ...] = KINDS) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    ranks, spares = rng.choice([(3, 1), (3, 2), (4, 1), (3, 1)])
    blows = []
    for number in range(rng.randint(1, spares + 1)):
        # Half of the times lie in what happens at a start, which is longer than a step.
        step = rng.choice([0, rng.randint(1, STEPS // 3)])
        delay_s = rng.random() * rng.choice([0.005, 0.05, 0.3])
        blows.append(Blow(rng.randrange(ranks), step, delay_s, is_pause=number == spares))
    rng.shuffle(blows)
    return Case(seed, kind, ranks, spares, tuple(blows))


@dataclass
class Outcome:
    """End of a job.

    Attributes:
        status: Exit status; None if it did not end in time.
        lines: What its ranks printed, by rank.
        text: All output.
        killed: Time and rank of each death.
        left: Files of the job in the node's memory.
    """

    status: int | None
    lines: dict[int, dict[str, Any]]
    text: str
    killed: list[tuple[float, int]]
    left: list[str]


def run(case: Case) -> Outcome:
    """Run a case as a job, and kill what it says."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    name = f"chaos-{os.getpid()}-{folder.name}"
    Steps(folder)
    env = {
        **without_launcher(os.environ), **VARIABLES,
        "MPIDIST_SPARES": str(case.spares), "MPIDIST_JOB": name,
    }  # fmt: skip
    command = [
        *launcher(case.ranks + case.spares, "--with-ft", "ulfm"), *python(),
        "-m", "tests.elastic.training", case.kind, str(folder), str(case.steps),
        "--timeout", str(_LIMIT_OF_RECOVERY_S), "--pause", "0.003",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    killed: list[tuple[float, int]] = []
    killer = threading.Thread(target=_hit, args=(process, case, Steps(folder).rows, killed))
    killer.start()
    try:
        out, err = process.communicate(timeout=_LIMIT_S)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        status = None
    killer.join()
    shutil.rmtree(folder)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    left = [str(path) for path in job_folder.MEMORY.glob(f"*{name}*")]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return Outcome(status, {line["rank"]: line for line in lines}, out + err, killed, left)


def _hit(process: subprocess.Popen[str], case: Case, rows: Any, killed: list[Any]) -> None:
    dead: set[int] = set()
    for blow in case.blows:
        begun: int | None = None
        while process.poll() is None:
            pid, _, now = rows[blow.rank].tolist()
            if pid and pid not in dead:
                begun = now if begun is None else begun
                if now >= min(begun + blow.step, case.steps - 2):
                    break
            time.sleep(5e-4)
        else:
            return
        time.sleep(blow.delay_s)
        try:
            if blow.is_pause:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(_PAUSE_S)
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
                dead.add(pid)
                killed.append((time.time(), blow.rank))
        except ProcessLookupError:
            return


def problems(case: Case, outcome: Outcome, expected: dict[int, str]) -> list[str]:
    """Return what is wrong with the outcome of a case.

    Args:
        case: The case.
        outcome: Of its job.
        expected: Digest of each rank without deaths.
    """
    if outcome.status is None:
        return ["it did not end"]
    found = []
    if outcome.status != 0:
        found.append(f"status {outcome.status}")
    digests = {rank: line["digest"] for rank, line in outcome.lines.items()}
    if digests != expected:
        found.append(f"digests {digests}, expected {expected}")
    if outcome.left:
        found.append(f"left {outcome.left}")
    for rank, line in outcome.lines.items():
        threads = [count for count, _ in line["counts"]]
        if len(threads) > 2 and threads[-1] > threads[1]:
            found.append(f"threads of rank {rank} at its starts: {threads}")
        files = [count for _, count in line["counts"]]
        if len(files) > 2 and files[-1] > files[1] + _MORE_FILES:
            found.append(f"descriptors of rank {rank} at its starts: {files}")
    return found


def undisturbed(case: Case) -> dict[int, str]:
    """Return the digest of each rank of a case's training without deaths, and without spares."""
    outcome = run(dataclasses.replace(case, blows=(), spares=0))
    assert outcome.status == 0, outcome.text
    return {rank: line["digest"] for rank, line in outcome.lines.items()}
