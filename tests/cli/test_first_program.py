"""README's first program as the doctor tries it: on these ranks, as a job, and with failures."""

import pytest
import torch.distributed as dist

from mpidist.cli import first_program
from mpidist.comm.discovery import child_job, installed
from tests.tools.support import missing


@pytest.mark.mpi
def test_the_ranks_of_a_job_sum_by_torch(world):
    assert first_program.all_reduce(30.0) == "" and not dist.is_initialized()


@pytest.mark.mpi
def test_a_wrong_sum_is_a_failure(world, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.fill_(-1))
    assert "got -1" in first_program.all_reduce(30.0) and not dist.is_initialized()


def test_two_ranks_are_started_as_a_job():
    library = installed.installed()
    if not library.mpirun:
        missing("no mpirun belongs to the MPI library")
    assert first_program.try_two_ranks(library.text, 60.0) == ""


def test_each_failure_has_a_text_of_its_own(tmp_path, monkeypatch):
    program = tmp_path / "mpirun"

    def verdict(text, silence_s=10.0):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return first_program.try_two_ranks("MPICH", silence_s)

    monkeypatch.setattr(child_job, "find_launcher", lambda is_open_mpi: str(program))
    fine = "echo mpidist-first-program fine"
    assert verdict(f"{fine}; {fine}") == ""
    assert "ended without output" in verdict(fine)
    assert verdict(f"{fine}; echo '[1] mpidist-first-program expected 3, got 1'") == (
        "expected 3, got 1"
    )
    assert "unknown backend" in verdict("echo 'ValueError: unknown backend'; exit 1")
    assert "hung" in verdict("exec sleep 60", 0.2)
    monkeypatch.setattr(child_job, "find_launcher", lambda is_open_mpi: None)
    assert "no mpirun" in first_program.try_two_ranks("MPICH", 1.0)
