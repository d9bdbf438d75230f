"""Trial of the launcher, with a real job and with failing ones."""

import stat

import pytest

from mpidist.comm.discovery import child_job, installed, launcher_trial
from tests.tools.support import missing


@pytest.mark.slow
def test_two_ranks_of_this_library_are_one_job():
    library = installed.installed()
    if not library.mpirun:
        missing("no mpirun belongs to the MPI library")
    assert launcher_trial.try_launcher(library.text, 60.0) == ""


def test_each_failure_of_a_launcher_has_a_text_of_its_own(tmp_path, monkeypatch):
    program = tmp_path / "mpirun"

    def verdict(text, silence_s=10.0):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return launcher_trial.try_launcher("MPICH", silence_s)

    monkeypatch.setattr(child_job, "find_launcher", lambda is_open_mpi: str(program))
    assert verdict("echo [0] mpidist-handshake 2 1") == ""
    assert "did not add up" in verdict("echo mpidist-handshake 2 3")
    assert "ended with exit status 5" in verdict("exit 5")
    assert "hung" in verdict("exec sleep 60", 0.2)
    monkeypatch.setattr(child_job, "find_launcher", lambda is_open_mpi: None)
    assert "no mpirun" in launcher_trial.try_launcher("MPICH", 1.0)
