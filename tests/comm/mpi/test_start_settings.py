"""Settings of Open MPI's start, by the launcher's variables; pure."""

import pytest

from mpidist.comm.mpi.launcher_env import is_on_one_node
from mpidist.comm.mpi.library import start_settings

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        (OPEN_MPI, False),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}, True),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, True),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, False),
        # mpirun within an allocation of two nodes, all ranks on the first.
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_STEP_NUM_NODES": "2"}, True),
    ],
)
def test_a_job_of_one_node_is_known_by_its_launcher(environ, expected):
    assert is_on_one_node(environ) is expected
    environ = dict(environ)
    with start_settings(environ):
        assert environ.get("OMPI_MCA_btl") == ("^ofi" if expected else None)
    assert "OMPI_MCA_btl" not in environ


def test_the_users_transports_stay():
    environ = {"OMPI_MCA_btl": "self,tcp"}
    with start_settings(environ):
        assert environ == {"OMPI_MCA_btl": "self,tcp"}
    assert environ == {"OMPI_MCA_btl": "self,tcp"}
