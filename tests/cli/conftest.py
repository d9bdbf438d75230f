"""Fixture of tests of the command: a call with a known site."""

import os

import pytest
from typer.testing import CliRunner

from mpidist.cli import app as cli
from mpidist.cli import run
from mpidist.cli.launch_request import Site

SITE = Site("openmpi", "Open MPI v5.0.11", "/m/lib/libmpi.so", "/m/bin/mpirun", "", (), 4, False)


@pytest.fixture
def call(monkeypatch):
    """Run a command line in this process on a machine with one Open MPI and no Slurm."""
    for name in [
        name for name in os.environ if name.startswith(("OMPI_COMM", "PMI", "SLURM", "MPI_LOCAL"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run, "site", lambda environ: SITE)
    return lambda *words: CliRunner().invoke(cli.app, list(words))
