"""A framework's own backend under mpirun without MPIDIST_REPLACE: the error says what to set."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def two_ranks(monkeypatch):
    """The environment of rank 0 of ``mpirun -n 2``."""
    for name in ("MPIDIST_REPLACE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)


@pytest.mark.parametrize(("size", "is_named"), [("2", True), ("1", False)])
@pytest.mark.usefixtures("two_ranks")
def test_the_error_names_the_variable(monkeypatch, size, is_named):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", size)
    # As Accelerate does, with the rank and size from mpirun's variables.
    with pytest.raises(ValueError, match="MASTER_ADDR expected, but not set") as caught:
        dist.init_process_group("gloo", rank=0, world_size=int(size))
    named = "mpirun (Open MPI) started 2 ranks: set MPIDIST_REPLACE=gloo,nccl,mpi" in str(
        caught.value
    )
    assert named is is_named, str(caught.value)


@pytest.mark.usefixtures("two_ranks")
def test_the_advice_is_for_groups_of_replaceable_backends_alone():
    # A rendezvous of torch's RPC, for example, which has no group.
    with pytest.raises(ValueError, match="MASTER_ADDR expected, but not set") as caught:
        next(dist.rendezvous("env://", rank=0, world_size=2))
    assert "MPIDIST_REPLACE" not in str(caught.value)
