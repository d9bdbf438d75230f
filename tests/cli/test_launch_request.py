"""Inputs of a launch plan; pure."""

import pytest

from mpidist.cli.launch_request import Request, Site, in_allocation, is_one_node

SITE = ("/m/lib", "/m/bin/mpirun", "", (), 4, False)


@pytest.mark.parametrize(
    ("abi", "library", "major"),
    [
        ("openmpi", "Open MPI v5.0.11, package", 5),
        ("openmpi", "Open MPI 4.1", 4),
        ("openmpi", "another", 0),
        ("mpich", "Open MPI v5.0.11", 0),
    ],
)
def test_the_major_version_is_open_mpis(abi, library, major):
    assert Site(abi, library, *SITE).open_mpi_major == major


@pytest.mark.parametrize(
    ("wish", "environ", "is_one"),
    [
        ({}, {}, True),
        ({"hosts": ("a",)}, {}, False),
        ({"hostfile": "hosts"}, {}, False),
        ({}, {"SLURM_JOB_ID": "1"}, True),
        ({}, {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, False),
        # What a login shell has left behind, outside a job.
        ({}, {"SLURM_JOB_NUM_NODES": "2"}, True),
        ({}, {"PBS_NODEFILE": "/var/spool/nodes"}, False),
        ({}, {"LSB_HOSTS": "a a b b"}, False),
        ({}, {"LSB_DJOB_HOSTFILE": "/var/spool/hosts"}, False),
        ({}, {"PE_HOSTFILE": "/var/spool/hosts"}, False),
        # Slurm's nodes count where it emulates PBS.
        ({}, {"SLURM_JOB_ID": "1", "PBS_NODEFILE": "/var/spool/nodes"}, True),
    ],
)
def test_all_ranks_are_here_unless_hosts_or_a_batch_system_say_otherwise(wish, environ, is_one):
    assert is_one_node(Request(("a.py",), **wish), environ) is is_one
    assert in_allocation(environ) is ("SLURM_JOB_ID" in environ)
