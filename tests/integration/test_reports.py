"""Reports on jobs that are dead, stopped, or hang, by the files of their ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import textwrap
import time

import pytest

from mpidist.comm.mpi import job_folder
from mpidist.comm.mpi.launcher_env import without_launcher
from mpidist.errors import MpidistError
from mpidist.reports import findings, job_files, operations
from mpidist.reports.job import ENDED, RUNS, STOPPED
from tests.reports.test_flight_recorder import analysed
from tests.tools.support import END_S, ROOT, VARIABLES, launcher, python

_LONGEST_S = 40
_BEGINNING = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from mpidist import rpc
dist.init_process_group("mpidist")
rank, x = dist.get_rank(), torch.ones(5)
for _ in range(3):
    dist.all_reduce(x)
"""
_ENDED = ("killed", "raised", "another shape")  # cases whose job ends by itself
# What each case does then, and the findings on it.
CASES = {
    "killed": (
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(x)
        """,
        ["rank 1 has not called all_reduce number"],
    ),
    "raised": (
        """
        if rank == 1:
            raise ValueError("the culprit")
        dist.all_reduce(x)
        """,
        ["rank 1 raised ValueError at "],
    ),
    "stopped": (
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(x)
        """,
        ["rank 1 is stopped", "rank 1 has not called all_reduce number"],
    ),
    "missing": (
        """
        def load_data():
            time.sleep(600)
        if rank == 2:
            load_data()
        dist.all_reduce(x)
        """,
        ["rank 2 has not called all_reduce number"],
    ),
    "another shape": (
        """
        dist.broadcast(torch.ones(7 if rank == 1 else 5), 0)
        dist.barrier()
        """,
        ["rank 1 called broadcast (7,) float32 where ranks 0, 2 called broadcast (5,) float32"],
    ),
    "calls": (
        """
        lock = threading.Lock()
        def take():
            with lock:
                pass
        def call_back():
            rpc.rpc_sync("worker0", take)
        rpc.init_rpc(f"worker{rank}")
        if rank == 0:
            with lock:
                rpc.rpc_sync("worker1", call_back, timeout=600)
        rpc.shutdown(timeout=600)
        """,
        ["calls wait for each other: worker0 -> worker1 -> worker0"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_report_says_what_keeps_a_job(case, tmp_path):
    steps, expected = CASES[case]
    program, name = tmp_path / "train.py", f"report-{os.getpid()}-{tmp_path.name}"
    program.write_text(_BEGINNING + textwrap.dedent(steps))
    folder = job_folder.path_of(name[:80])
    process = subprocess.Popen(
        [*launcher(3), *python(), str(program)],
        env={**without_launcher(os.environ), **VARIABLES, "MPIDIST_JOB": name},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    job = None
    try:
        end = time.monotonic() + _LONGEST_S
        while True:
            time.sleep(0.2)
            if case in _ENDED and process.poll() is None:
                continue
            try:
                (job,) = job_files.read(folder)
                _require(case, expected, job)
                _require_of_torch(case, analysed(tmp_path / "dumps", job.recordings.values()))
                break
            except (AssertionError, MpidistError):
                # The job has not come so far.
                if time.monotonic() > end:
                    raise
    finally:
        for each in job.recordings.values() if job is not None else ():
            if each.is_alive:
                os.kill(each.pid, signal.SIGKILL)
        process.terminate()
        process.wait(END_S)
        shutil.rmtree(folder, ignore_errors=True)


_PROGRAMS = """
import os, sys, time, torch, mpidist.comm
mpidist.comm.init()
mpidist.comm.init().close()
coupled = mpidist.comm.couple({"train": 2, "sim": 2})
group = mpidist.comm.init(comm=coupled.comm)
if coupled.program == sys.argv[1]:
    for _ in range(5):
        group.barrier()
    if group.rank == 1:
        time.sleep(600)
while True:
    group.all_reduce(torch.ones(3))
    time.sleep(0.05)
"""
_DEATH = """
import os, signal, time, torch, mpidist.comm
from mpidist import elastic
starts = []
def train():
    starts.append(1)
    group = mpidist.comm.init(timeout=300)
    if len(starts) == 1:
        for _ in range(10):
            group.all_reduce(torch.ones(3))
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif group.rank == 1:
        time.sleep(600)
    while True:
        group.all_reduce(torch.ones(7))
elastic.run(train)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "words", "options", "keeps", "places"),
    [
        (_PROGRAMS, ["train"], (4,), [True, False], [[0, 1], [2, 3]]),
        (_PROGRAMS, ["sim"], (4,), [False, True], [[0, 1], [2, 3]]),
        (_DEATH, [], (3, "--with-ft", "ulfm"), [True], [[0, 2]]),
    ],
)
def test_worlds_of_a_job_are_not_mixed(program, words, options, keeps, places, tmp_path):
    """In one world rank 1 is at fault: its pid is that of a living process, and no other is."""
    path, name = tmp_path / "train.py", f"worlds-{os.getpid()}-{tmp_path.name}"
    path.write_text(program)
    folder = job_folder.path_of(name[:80])
    process = subprocess.Popen(
        [*launcher(*options), *python(), str(path), *words],
        env={**without_launcher(os.environ), **VARIABLES, "MPIDIST_JOB": name},
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    jobs = []
    try:
        end = time.monotonic() + _LONGEST_S
        while True:
            time.sleep(0.2)
            try:
                jobs = job_files.read(folder)
                _require_of_worlds(jobs, keeps, places)
                break
            except (AssertionError, MpidistError):
                if time.monotonic() > end:
                    raise
    finally:
        for job in jobs:
            for each in job.recordings.values():
                if each.is_alive:
                    os.kill(each.pid, signal.SIGKILL)
        process.terminate()
        process.wait(END_S)
        shutil.rmtree(folder, ignore_errors=True)


def _require_of_worlds(jobs, keeps, places):
    found = [
        [int(each.path.name.partition("-")[2]) for each in job.recordings.values()] for job in jobs
    ]
    assert found == places
    for job, is_kept in zip(jobs, keeps, strict=True):
        assert set(job.states.values()) == {RUNS}
        texts = [finding.text for finding in findings.findings(job)]
        assert len(texts) == is_kept, texts
        assert all(text.startswith("rank 1 has not called all_reduce number") for text in texts)


def _require(case, expected, job):
    """Require what the report has of a case."""
    found = findings.findings(job)
    texts = [finding.text for finding in found]
    assert len(texts) >= len(expected) and all(map(str.startswith, texts, expected)), texts
    rows = [row.text for row in operations.rows(job, 20)]
    assert any("all_reduce number" in row for row in rows), rows
    states = dict.fromkeys(range(3), ENDED if case in _ENDED else RUNS)
    if case == "stopped":
        states[1] = STOPPED
    assert job.states == states
    # A rank that waits in MPI writes its stacks, too; one that is stopped may have before.
    assert set(job.stacks) >= {rank for rank, state in states.items() if state == RUNS}
    if case == "missing":
        lines = [line.function for stack in job.stacks[2] for line in stack.lines]
        assert "load_data" in lines
    if case == "raised":
        assert texts == [texts[0]] and "train.py:11: the culprit" in texts[0]
    if case == "calls":
        circle = findings.findings(job)[0]
        assert (
            len(circle.details) == 3 and "in take(); the thread in call_back" in circle.details[2]
        )


def _require_of_torch(case, collectives):
    """Require that torch's analyzer of the dumps finds the same."""
    wrong = [one for one in collectives if not one.pass_check or one.missing_ranks]
    if case == "calls":
        assert not wrong
    elif case == "another shape":
        assert any(set(one.mismatch_collectives or ()) in ({1}, {0, 2}) for one in wrong)
    else:
        assert wrong[-1].missing_ranks == {2 if case == "missing" else 1}
