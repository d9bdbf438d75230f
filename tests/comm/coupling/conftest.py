"""Programs under test: the ranks of a job, divided in two."""

import threading

import pytest
from mpi4py import MPI

from tests.tools.support import agree


@pytest.fixture
def job(group):
    """Return a communicator of all processes."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Barrier()
    comm.Free()
    left = [t.name for t in threading.enumerate() if t.name == "mpidist-inlet"]
    agree(group, not left, f"threads left: {left}")
