"""Start of jobs: facts about the machine, exit statuses and signals of real jobs."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpidist.cli import run
from mpidist.cli.launch_plan import Plan
from mpidist.comm.discovery import installed
from mpidist.comm.mpi.launcher_env import without_launcher
from mpidist.errors import LaunchError
from tests.tools.support import ROOT, missing, python, started


def test_a_command_line_can_be_typed():
    planned = Plan(("/m/mpirun", "-n", "2", "python", "a b.py"), {"OMP_NUM_THREADS": "1"})
    assert run.text_of(planned) == "env OMP_NUM_THREADS=1 /m/mpirun -n 2 python 'a b.py'"
    assert run.text_of(Plan(("srun", "x"), {})) == "srun x"


def test_scripts_and_programs_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert run.program(("train.py", "-x")) == (sys.executable, "train.py", "-x")
    assert run.program(("sh", "-c", ":")) == ("sh", "-c", ":")
    with pytest.raises(LaunchError, match="no such file"):
        run.program(("gone.py",))


def test_srun_is_asked_inside_a_job_alone(tmp_path, monkeypatch):
    found = installed.Installed("mpich", "MPICH Version: 5", "/m/libmpi.so", "/m/mpiexec")
    monkeypatch.setattr(run.installed, "installed", lambda: found)
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nprintf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n' >&2\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert run.site({}).srun == "" and run.site({}).mpi_types == ()
    inside = run.site({"SLURM_JOB_ID": "1"})
    assert (inside.srun, inside.mpi_types, inside.mpirun) == (
        str(srun),
        ("none", "pmi2"),
        "/m/mpiexec",
    )
    assert run._mpi_types(str(tmp_path / "gone")) == ()


def test_hardware_threads_of_a_core_are_one(tmp_path):
    for thread, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        (tmp_path / f"cpu{thread}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{thread}" / "topology" / "thread_siblings_list").write_text(
            f"{siblings}\n"
        )
    assert [
        run.physical_cores(threads, tmp_path) for threads in ([0, 1, 2, 3], [0, 2], [0, 7])
    ] == [2, 1, 2]


@pytest.mark.slow
def test_the_exit_status_is_the_jobs_and_a_signal_ends_it(tmp_path):
    """With this Python's MPI, ranks connect, the status is a rank's, and SIGTERM ends all ranks."""
    if not installed.installed().mpirun:
        missing("no mpirun belongs to the MPI library")
    (tmp_path / "train.py").write_text(
        "from mpidist.comm.mpi import runtime\nworld = runtime.world()\nprint('rank', world.rank, "
        "world.size)"
    )
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2"]
    met = started([*command, str(tmp_path / "train.py")], 60, {"MPIDIST_CUDA_AWARE": "0"})
    assert met.returncode == 0 and sorted(met.stdout.split("\n")) == ["", "rank 0 2", "rank 1 2"], (
        met.stdout + met.stderr
    )
    done = started([*command, "sh", "-c", "exit 7"], 60)
    assert done.returncode == 7, done.stdout + done.stderr
    environ = {
        name: text
        for name, text in without_launcher(os.environ).items()
        if name != "OMP_NUM_THREADS"
    }
    hangs = ["sh", "-c", "echo $$ $OMP_NUM_THREADS; exec sleep 600"]
    with subprocess.Popen(
        [*command, *hangs], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(2)]
        assert [threads for _, threads in lines] == ["1", "1"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    deadline = time.monotonic() + 20
    left = [rank for rank, _ in lines]
    while any(os.path.exists(f"/proc/{rank}") for rank in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{rank}") for rank in left)


@pytest.mark.slow
def test_jobs_start_without_a_home(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import mpidist; mpidist.comm.init(); print('begun')")
    for name in ("HOME", "XDG_CACHE_HOME", "MPIDIST_CACHE"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", str(tmp_path / "train.py")]
    done = started(command, 60)
    assert done.returncode == 0 and done.stdout.count("begun") == 2, done.stderr
    assert "Traceback" not in done.stderr and "home directory" not in done.stderr
    command = [*python(), "-m", "mpidist", "doctor", "--no-launcher"]
    done = started(command, 60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(done.stdout.splitlines()) < 24 and "HOME is not set" in done.stdout
