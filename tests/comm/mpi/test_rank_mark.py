"""Programs that a rank starts: they know that they are not that rank."""

import os
import socket
import subprocess
import sys

import pytest

from mpidist.comm import without_launcher
from mpidist.comm.mpi import rank_mark
from tests.tools.support import agree

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "a@1",
    "PMIX_RANK": "0",
}  # fmt: skip
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
SLURM = {"PMIX_RANK": "0", **STEP}


@pytest.fixture
def started(monkeypatch):
    """Return a function: leave a mark, and look at an environment as another process does."""

    def look(environ, changed=None):
        environ = dict(environ)
        rank_mark.leave(environ)
        assert not rank_mark.is_of_parent(environ)
        environ.update(changed or {})
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            return rank_mark.is_of_parent(environ)

    return look


@pytest.mark.parametrize("environ", [OPEN_MPI, SLURM], ids=["mpirun", "srun"])
def test_a_program_with_the_variables_of_its_rank_is_known(started, environ):
    assert started(environ)
    # A launcher that the rank has started gives its ranks others.
    assert not started(environ, {"PMIX_NAMESPACE": "b@1", "SLURM_STEP_ID": "1"})


def test_a_program_without_a_launcher_starts_others(started):
    assert not started({})
    # A step that MPI is not connected to: a program of one process, of which any number may start.
    assert not started(STEP)
    assert not started({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"})


def test_ranks_of_another_hydra_have_another_socket(started):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environ = {"MPI_LOCALNRANKS": "2", "PMI_RANK": "0", "PMI_FD": str(ours.fileno())}
        assert started(environ)
        marked = dict(environ)
        rank_mark.leave(marked)
        mark = marked[rank_mark.VARIABLE].replace(str(os.getpid()), "1", 1)
        place = mark.split(" ", 2)[2]
        closed = {**environ, rank_mark.VARIABLE: mark}
        other = {**environ, rank_mark.VARIABLE: f"1 {os.fstat(theirs.fileno()).st_ino} {place}"}
        assert rank_mark.is_of_parent(closed) and not rank_mark.is_of_parent(other)
    assert rank_mark.is_of_parent(closed)
    # A file that the child has opened, under the number of the socket that it lacks.
    number, opened = int(environ["PMI_FD"]), os.open(os.devnull, os.O_RDONLY)
    os.dup2(opened, number)
    try:
        assert rank_mark.is_of_parent(closed)
    finally:
        for each in {opened, number}:
            os.close(each)


PROGRAM = "import mpidist.comm; print('world of', mpidist.comm.init().size)"


@pytest.mark.mpi
@pytest.mark.usefixtures("world")
def test_a_program_that_a_rank_starts_is_refused_or_a_world_of_its_own(group):
    environ = dict(os.environ)
    is_launched = rank_mark.VARIABLE in environ
    for env in (environ, without_launcher(environ)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=90
        )
        text = done.stdout + done.stderr
        if env is environ and is_launched:
            expected = "LaunchError: a rank of a job has started this program"
        else:
            expected = "world of 1"
        agree(group, expected in text, text[-500:])
