"""Starts of jobs as users' scripts do them: exported variables, other launchers, parts of a job."""

import pytest

from tests.support import launcher, short_job

pytestmark = pytest.mark.slow

# As a job script does: mpirun -n 2 bash -c "export RANK=...; python train.py".
_FROM_MPIRUN = ("RANK=$OMPI_COMM_WORLD_RANK", "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK")
_TRAINS = """
    import os, torch, torch.distributed as dist
    dist.init_process_group({backend!r})
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {{dist.get_rank()}} of {{total.item():.0f}} as {{os.environ['RANK']}}")
"""


def exporting(exports, script, **variables):
    """Run two ranks by mpirun, each with exported variables; return what they print."""
    line = " ".join(f"export {export};" for export in exports) + ' exec "$@"'
    shell = [*launcher(2), "bash", "-c", line, "bash"]
    return short_job(2, script, command=shell, env=variables)


@pytest.mark.parametrize(
    ("exports", "backend", "variables"),
    [
        (_FROM_MPIRUN, "mpidist", {}),
        ((*_FROM_MPIRUN, "WORLD_SIZE=2", "MASTER_ADDR="), "mpidist", {}),
        (_FROM_MPIRUN, "nccl", {"MPIDIST_REPLACE": "nccl"}),
    ],
    ids=["RANK", "WORLD_SIZE", "replaced"],
)
def test_an_exported_rank_needs_no_address(exports, backend, variables):
    done = exporting(exports, _TRAINS.format(backend=backend), **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 as 0", "rank 1 of 2 as 1"]


@pytest.mark.parametrize(
    ("exports", "variables"),
    [
        (("RANK=0",), {}),
        (("RANK=0",), {"MPIDIST_REPLACE": "gloo"}),
        (("RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29531"), {}),
    ],
    ids=["RANK", "replaced", "complete"],
)
def test_a_rank_that_is_not_mpis_is_refused_with_both(exports, variables):
    done = exporting(exports, _TRAINS.format(backend="mpidist"), **variables)
    assert done.returncode != 0
    assert "RANK=0 is set, but MPI started this process as RANK=1" in done.stderr
    assert "as 0" not in done.stdout
