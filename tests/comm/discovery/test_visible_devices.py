"""Devices that some rank of a node does not see: MPI gets no pointer to their memory."""

from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.discovery import capability, library_report
from mpidist.comm.discovery.capability import agreed_operations, capabilities, known_operations
from tests.comm.discovery.test_capability import EVERYTHING, forget
from tests.tools.support import agree

pytestmark = pytest.mark.usefixtures("folder")


def pretend_devices(monkeypatch, visible):
    """Pretend that this process sees these devices, named by their UUID."""
    properties = [SimpleNamespace(uuid=name) for name in visible]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(capability, "_key", lambda device, is_cuda_first: {"device": "pretended"})
    monkeypatch.setattr(library_report, "cuda_support", lambda: (True, "it says so"))
    monkeypatch.setattr(capability.runtime, "device", lambda: torch.device("cuda", 0))


@pytest.mark.mpi(min_size=2)
def test_devices_that_ranks_of_a_node_do_not_see_are_not_given_to_mpi(group, launches, monkeypatch):
    """With ``srun --gpus-per-task=1`` device 0 differs by rank, and a trial would use one."""
    where = torch.device("cuda", 0)
    pretend_devices(monkeypatch, [f"GPU-{group.rank}"])
    agree(
        group,
        agreed_operations(group._comm, where) == frozenset() and not launches,
        "tried, or used",
    )
    agree(
        group,
        not known_operations(where) and "--gpu-bind=none" in capabilities().operations["Bcast"],
        "messages",
    )
    forget(group._comm, monkeypatch)
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    agree(
        group,
        agreed_operations(group._comm, where) == known_operations(where) == EVERYTHING,
        "forced",
    )


@pytest.mark.mpi(min_size=2)
def test_one_device_of_all_ranks_is_tried(group, launches, monkeypatch):
    where = torch.device("cuda", 0)
    pretend_devices(monkeypatch, ["GPU-0"])
    capability._try_operations(where, False)
    agree(
        group,
        known_operations(where) == frozenset(),
        "a message goes by pointer before the ranks have compared their devices",
    )
    working = agreed_operations(group._comm, where)
    agree(group, working == known_operations(where) == EVERYTHING - {"Alltoallv"}, f"{working}")
