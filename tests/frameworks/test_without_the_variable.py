"""A framework's own backend under mpirun without MPIDIST_REPLACE: the error says what to set."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.mark.parametrize(("size", "is_named"), [("2", True), ("1", False)])
def test_the_error_names_the_variable(monkeypatch, size, is_named):
    for name in ("MPIDIST_REPLACE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("SIZE", size), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    # As Accelerate does, with the rank and size from mpirun's variables.
    with pytest.raises(ValueError, match="MASTER_ADDR expected, but not set") as caught:
        dist.init_process_group("gloo", rank=0, world_size=int(size))
    named = "mpirun (Open MPI) started 2 ranks: set MPIDIST_REPLACE=gloo,nccl,mpi" in str(
        caught.value
    )
    assert named is is_named, str(caught.value)
