"""Starts: what the machine is asked, and real jobs whose status and signals pass through."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpidist.cli import run
from mpidist.cli.launch_plan import Plan
from mpidist.comm import installed
from mpidist.errors import LaunchError
from tests.support import ROOT, missing, started


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
    assert (inside.srun, inside.mpi_types, inside.mpirun) == (str(srun), ("none", "pmi2"), "/m/mpiexec")
    assert run._mpi_types(str(tmp_path / "gone")) == ()


_RANK = """
import os, signal, sys, time
import mpidist.comm
world = mpidist.comm.init()
total = world.all_gather_object(os.environ["OMP_NUM_THREADS"])
if world.rank == 1:
    print("threads", total, flush=True)
    if sys.argv[1:] == ["hang"]:
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
    sys.exit(7)
world.barrier() if sys.argv[1:] == ["hang"] else None
"""


@pytest.mark.slow
def test_the_exit_status_is_the_jobs_and_a_signal_ends_it(tmp_path):
    """Two jobs of the MPI that this Python loads: one rank ends with 7; SIGTERM leaves no rank behind."""
    if not installed.installed().mpirun:
        missing("no mpirun belongs to the MPI library")
    script = tmp_path / "train.py"
    script.write_text(_RANK)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", str(script)]
    done = started(command, 90, {"OMP_NUM_THREADS": "2"})
    assert done.returncode == 7 and "threads ['2', '2']" in done.stdout, done.stdout + done.stderr
    environ = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen([*command, "hang"], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "threads ['1', '1']\n"
        rank = int(process.stdout.readline().split()[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{rank}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{rank}")
