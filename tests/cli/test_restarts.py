"""Restarts: only after progress, as often as asked, with the commits of the start before."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from mpidist.checkpoint import progress
from mpidist.cli import restarts
from mpidist.comm.discovery import installed
from mpidist.comm.mpi import job_folder
from mpidist.comm.mpi.launcher_env import without_launcher
from tests.tools.support import ROOT, VARIABLES, missing, python, started


def test_a_job_is_started_again_after_progress_alone():
    for status, before, now, starts, goes_on, words in (
        (0, -1, 3, 1, False, ""),
        (75, -1, 3, 1, False, ""),  # its state is saved for the scheduler
        (1, -1, -1, 1, False, "status 1, and no commit or checkpoint is newer"),
        (1, 3, 3, 2, False, "it is not started again"),
        (137, -1, 3, 1, True, "status 137 after step 3: start 2 of at most 3"),
        (1, 3, 4, 2, True, "start 3 of at most 3"),
        (1, 4, 9, 3, False, "after step 9; it was started 3 times, the most"),
    ):
        found = restarts.next_step(status, before, now, starts, 2)
        assert found[0] is goes_on and words in found[1] and bool(words) == bool(found[1])


def shell(tmp_path, text, most=2):
    """Return the starts of a job that is a shell script; ``$STEP`` is the file of its progress."""
    path = tmp_path / "progress"
    environ = {**os.environ, "STEP": str(path), "STARTS": str(tmp_path / "starts")}
    script = f"echo . >> $STARTS; {text}"
    return restarts._Starts(["sh", "-c", script], environ, path, most)


def test_the_starts_of_a_job_are_counted(tmp_path, capfd):
    adds = "echo $(wc -l < $STARTS) > $STEP;"
    for text, status, starts in (
        (f"{adds} exit 3", 3, 3),
        (f"{adds} test $(wc -l < $STARTS) = 2", 0, 2),
        ("exit 4", 4, 1),
        (f"{adds} kill -9 $$", 137, 3),
        ("echo x > $STEP; exit 5", 5, 1),
    ):
        assert shell(tmp_path, text).run() == status
        assert (tmp_path / "starts").read_text() == ".\n" * starts
        (tmp_path / "starts").unlink()
        (tmp_path / "progress").unlink(missing_ok=True)
    assert (
        "mpidist run: the job ended with status 3 after step 1: start 2 of" in capfd.readouterr()[1]
    )


# The trap stands before the progress says that the signal may come.
_TRAPPED = "trap 'kill $!; {}' {}; sleep 60 & echo 1 > $STEP; wait"


@pytest.mark.parametrize(
    ("number", "job", "status"),
    [
        (signal.SIGTERM, "echo 1 > $STEP; exec sleep 60", 128 + signal.SIGTERM),
        # As Open MPI's mpirun ends.
        (signal.SIGINT, _TRAPPED.format("exit 1", "INT"), 128 + signal.SIGINT),
        (signal.SIGTERM, _TRAPPED.format("exit 75", "TERM"), 75),
    ],
)
def test_a_signal_ends_the_job_and_its_starts(tmp_path, number, job, status):
    command = "import sys; from tests.cli import test_restarts as t; from pathlib import Path; "
    command += f"sys.exit(t.shell(Path(sys.argv[1]), {job!r}).run())"
    start = [*python(), "-c", command, str(tmp_path)]
    with subprocess.Popen(start, cwd=ROOT, env={**os.environ, **VARIABLES}) as process:
        deadline = time.monotonic() + 30
        while progress.read(tmp_path / "progress") != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == status
    assert (tmp_path / "starts").read_text() == ".\n"


def test_a_signal_while_the_launcher_starts_is_the_one_that_it_gets(tmp_path, monkeypatch):
    popen = subprocess.Popen

    def started_then_signalled(*args, **kwargs):
        process = popen(*args, **kwargs)
        deadline = time.monotonic() + 30
        while progress.read(tmp_path / "progress") != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(restarts.subprocess, "Popen", started_then_signalled)
    assert shell(tmp_path, _TRAPPED.format("exit 7", "INT")).run() == 7


_TRAIN = """
    import os, signal
    import torch
    import mpidist.comm
    from mpidist.checkpoint import commit, load
    from mpidist.ddp import DistributedDataParallel
    world = mpidist.comm.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = dict(model=model, optimizer=optimizer)
    resumed = load("run", **state)
    start = 0 if resumed is None else resumed.step
    print(f"rank {world.rank} begins at {start}", flush=True)
    for step in range(start, 6):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(step))).sum().backward()
        optimizer.step()
        if step == 3 and start == 0:
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            world.barrier()
        commit("run", step + 1, **state)
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["", "mpich"])
def test_killed_ranks_are_started_again_from_their_commits(tmp_path, library):
    variables = {"MPIDIST_CUDA_AWARE": "0"}
    if library:
        file = ROOT / ".mpich" / "lib" / "libmpi.so.12"
        if not file.exists():
            missing("the mpich wheel is not installed in .mpich")
        variables["MPI4PY_LIBMPI"] = str(file)
    elif not installed.installed().mpirun:
        missing("no mpirun belongs to the MPI library")
    (tmp_path / "train.py").write_text(textwrap.dedent(_TRAIN))
    environ = {**without_launcher(os.environ), **variables}
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", "--restarts", "2"]
    before = set(job_folder.MEMORY.glob(f"mpidist-{os.geteuid()}-run-*"))
    done = started([*command, *python(), str(tmp_path / "train.py")], 80, environ)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    # Lines of two ranks may be one.
    for words in (
        "rank 0 begins at 0",
        "rank 1 begins at 0",
        "rank 0 begins at 3",
        "rank 1 begins at 3",
    ):
        assert words in done.stdout, text
    assert done.stdout.count("begins at") == 4, text
    assert done.stderr.count("after step 3: start 2 of at most 3") == 1, text
    assert set(job_folder.MEMORY.glob(f"mpidist-{os.geteuid()}-run-*")) <= before, text
