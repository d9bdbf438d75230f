"""Facts about a process and its node."""

import os
import socket
from types import SimpleNamespace

import torch

from mpidist.cli import facts


def test_facts_of_this_process():
    found = facts.collect(
        {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "3",
            "SLURM_JOB_ID": "1",
            "UCX_TLS": "tcp",
        },
        "/m/mpirun",
    )
    assert (found.rank, found.tasks, found.launcher) == (3, 4, "mpirun (Open MPI)")
    assert found.host == socket.gethostname() and set(found.bound_to) == os.sched_getaffinity(0)
    assert (
        found.in_allocation
        and found.settings == {"UCX_TLS": "tcp"}
        and found.path_mpirun == "/m/mpirun"
    )
    assert found.versions["torch"] == torch.__version__ and found.versions["mpi4py"]
    assert 0 <= found.shm_free_bytes <= found.shm_bytes or found.shm_bytes == -1
    assert (
        found.device is None
        and found.mpi is None
        and found.torch_threads == torch.get_num_threads()
    )
    assert facts.with_device(found, torch.device("cpu")) is found


def test_settings_are_the_users_and_not_the_launchers():
    environ = {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_ess_base_vpid": "3",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "PMIX_RANK": "3",
        "MPIDIST_DEBUG": "1",
        "FI_PROVIDER": "tcp",
        "HOME": "/h",
        "OMP_NUM_THREADS": "4",
        "SLURM_MPI_TYPE": "pmix",
        "SLURM_JOB_ID": "3",
    }
    assert set(facts.settings(environ)) == {
        "OMPI_MCA_pml",
        "OMPI_MCA_mpi_yield_when_idle",
        "MPIDIST_DEBUG",
        "FI_PROVIDER",
        "OMP_NUM_THREADS",
        "SLURM_MPI_TYPE",
    }


def test_a_device_is_named_among_those_that_are_seen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name="H100", uuid=f"GPU-{index}"),
    )
    found = facts.with_device(facts.collect({}), torch.device("cuda", 1))
    assert found.device == facts.Device(1, "H100", "GPU-1", ("GPU-0", "GPU-1"))


def test_missing_shared_memory_and_packages_are_reported():
    assert facts._size_of("/there is no such folder") == (-1, -1)
    assert facts._version("no-such-package") == ""
