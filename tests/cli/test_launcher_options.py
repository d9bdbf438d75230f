"""Options of srun, mpirun and mpiexec for one request; pure."""

from __future__ import annotations

import pytest

from mpidist.cli.launch_request import Request, Site
from mpidist.cli.launcher_options import (
    hydra_options,
    mpirun_options,
    program_words,
    srun_command,
)
from mpidist.errors import LaunchError

PROGRAM = ("python", "a.py")


def site(library="Open MPI v5.0.1", abi="openmpi", cores=4, is_root=False):
    return Site(abi, library, "/lib/libmpi.so", "/bin/mpirun", "/bin/srun", (), cores, is_root)


def test_a_colon_alone_is_kept_from_the_launcher():
    assert program_words(("a", "b:c")) == ("a", "b:c")
    assert program_words(("a", ":", "b c")) == ("/bin/sh", "-c", "exec a : 'b c'")


@pytest.mark.parametrize(
    ("request_", "environ", "options"),
    [
        (Request(PROGRAM), {}, []),
        (
            Request(PROGRAM, 4, 2, binding="numa", tags=True),
            {},
            ["--ntasks=4", "--nodes=2", "--cpu-bind=ldoms", "--label"],
        ),
        (Request(PROGRAM), {"SLURM_STEP_ID": "4294967290"}, []),
        (Request(PROGRAM), {"SLURM_STEP_ID": "0"}, ["--overlap"]),
        (Request(PROGRAM), {"SLURM_CPUS_PER_TASK": "8"}, ["--cpus-per-task=8"]),
    ],
)
def test_srun(request_, environ, options):
    command = srun_command(request_, site(), environ, "pmix")
    assert command == ("/bin/srun", "--mpi=pmix", *options, "--kill-on-bad-exit=1", *PROGRAM)


@pytest.mark.parametrize(
    ("request_", "library", "options"),
    [
        (Request(PROGRAM), "Open MPI v5.0.1", ["--bind-to", "none"]),
        (Request(PROGRAM, binding="socket"), "Open MPI v5.0.1", ["--bind-to", "package"]),
        (Request(PROGRAM, binding="socket"), "Open MPI v4.1", ["--bind-to", "socket"]),
        (Request(PROGRAM, tags=True), "Open MPI v5.0.1",
         ["--bind-to", "none", "--output", "tag"]),
        (Request(PROGRAM, tags=True), "Open MPI v4.1", ["--bind-to", "none", "--tag-output"]),
        (Request(PROGRAM, ulfm=True), "Open MPI v5.0.1",
         ["--bind-to", "none", "--with-ft", "ulfm"]),
        (Request(PROGRAM, ulfm=True, heartbeat=True), "Open MPI v5.0.1",
         ["--bind-to", "none", "--with-ft", "ulfm", "--mca", "mpi_ft_detector", "1",
          "--mca", "mpi_ft_detector_thread", "1", "--mca", "mpi_ft_detector_period", "0.2",
          "--mca", "mpi_ft_detector_timeout", "0.8"]),
        (Request(PROGRAM, nodes=3), "Open MPI v5.0.1",
         ["--bind-to", "none", "--map-by", "ppr:2:node"]),
    ],
)  # fmt: skip
def test_mpirun_on_one_node(request_, library, options):
    assert mpirun_options(request_, site(library), {}, 4, {}) == ["-n", "4", *options]


def test_mpirun_with_more_ranks_than_cores_and_as_root():
    variables = {"OMP_NUM_THREADS": "1"}
    options = mpirun_options(Request(PROGRAM), site(is_root=True), {}, 5, variables)
    assert options[:3] == ["-n", "5", "--oversubscribe"] and "-x" not in options
    assert variables == {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def test_mpirun_between_nodes_exports_the_variables_that_ranks_read():
    environ = {"MPIDIST_DEBUG": "1", "EDITOR": "vi", "OMPI_MCA_btl": "tcp"}
    variables = {"OMP_NUM_THREADS": "1", "HOME": "/tmp"}
    request = Request(PROGRAM, hosts=("a", "b:2"), hostfile="hosts")
    options = mpirun_options(request, site(), environ, 9, variables)
    assert "--oversubscribe" not in options
    assert options[options.index("--host") :] == [
        "--host", "a,b:2", "--hostfile", "hosts", "-x", "MPIDIST_DEBUG", "-x", "OMP_NUM_THREADS",
    ]  # fmt: skip
    nodes = {"PBS_NODEFILE": "/var/spool/nodes", **environ}
    options = mpirun_options(Request(PROGRAM), site(), nodes, 9, {})
    assert options == ["-n", "9", "--bind-to", "none", "-x", "MPIDIST_DEBUG"]


def test_mpiexec():
    request = Request(PROGRAM, nodes=2, hosts=("a", "b"), hostfile="f", binding="core", tags=True)
    assert hydra_options(request, 3) == [
        "-n", "3", "-bind-to", "core", "-hosts", "a,b", "-f", "f", "-ppn", "2", "-prepend-rank",
    ]  # fmt: skip
    assert hydra_options(Request(PROGRAM), 3) == ["-n", "3"]


def test_only_open_mpi_5_survives_deaths():
    request = Request(PROGRAM, ulfm=True)
    with pytest.raises(LaunchError, match=r"needs Open MPI 5 or newer; this is Open MPI v4.1"):
        mpirun_options(request, site("Open MPI v4.1\nmore"), {}, 2, {})
    assert "ulfm" in mpirun_options(request, site("Open MPI"), {}, 2, {})  # an unknown version
    with pytest.raises(LaunchError, match="MPICH has no ULFM"):
        hydra_options(request, 2)
