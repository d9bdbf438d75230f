"""Launchers' variables, and their removal for child jobs; pure."""

import pytest

from mpidist.comm.mpi.launcher_env import (
    MPICH,
    OPEN_MPI,
    Launch,
    device_settings,
    from_environment,
    in_file_names,
    job_name,
    library_problem,
    program_number,
    singleton_problem,
    start_name,
    without_launcher,
)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch("python", None, None)),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            Launch("mpirun (Open MPI)", 4, 1),
        ),
        (
            {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
            Launch("mpiexec (Hydra)", 2, 1),
        ),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}, Launch("srun", 8, 3)),
        (
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            Launch("torchrun", 2, 0),
        ),
        ({"PMI_SIZE": "2"}, Launch("mpiexec (PMI)", 2, None)),
    ],
)
def test_each_launcher_is_found_by_its_variables(environ, expected):
    assert from_environment(environ) == expected


def test_most_launchers_set_the_rank():
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "3",
    }
    assert from_environment(environ) == Launch("mpirun (Open MPI)", 4, 1, 3)
    assert from_environment({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}).rank == 5
    assert from_environment({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4", "PMI_RANK": "3"}).rank == 3


def test_mpirun_precedes_the_slurm_allocation_around_it():
    environ = {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_LOCALID": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    }
    assert from_environment(environ) == Launch("mpirun (Open MPI)", 4, 2)


def test_a_batch_shell_is_no_launcher():
    # sbatch sets these for the script itself, where Python without a launcher is a world of one.
    assert (
        from_environment({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).launcher
        == "python"
    )


def test_a_world_that_fits_is_no_problem():
    assert singleton_problem(Launch("srun", 4, 0), 4) is None
    assert singleton_problem(Launch("srun", 1, 0), 1) is None
    assert singleton_problem(Launch("python", None, None), 1) is None


def test_torchruns_error_names_mpirun_and_srun():
    problem = singleton_problem(Launch("torchrun", 3, 0), 1)
    assert problem is not None
    assert "torchrun" in problem and "mpirun -n 3" in problem and "srun -n 3" in problem


def test_a_foreign_launcher_is_named():
    problem = singleton_problem(Launch("srun", 4, 0), 1)
    assert problem is not None
    assert "srun started 4 tasks" in problem and "--mpi=pmix" in problem


# --- child jobs ---

# Variables in a rank's environment: launchers of Open MPI and MPICH, Slurm.
_LEFT = (
    "OMPI_COMM_WORLD_RANK", "OMPI_MCA_num_procs", "OMPI_MCA_PREFIXES", "OMPI_UNIVERSE_SIZE",
    "PMIX_RANK", "PMIX_SERVER_URI41",
    "PRTE_LAUNCHED", "PMI_FD", "PMI_RANK", "HYDI_CONTROL_FD", "HYDRA_HOST_FILE", "MPI_LOCALRANKID",
    "MPIEXEC_TIMEOUT",
    "MV2_COMM_WORLD_RANK", "SLURM_JOB_ID", "SLURMD_NODENAME", "PBS_NODEFILE",
    "MPICH_INTERFACE_HOSTNAME",
)  # fmt: skip
_OF_THE_USER = (
    "FI_PROVIDER", "MPI4PY_LIBMPI", "MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA",
    "OMPI_MCA_accelerator",
    "OMPI_MCA_btl_smcuda_use_cuda_ipc", "OMPI_MCA_coll_cuda_priority", "OMPI_MCA_mtl",
    "OMPI_MCA_opal_cuda_verbose",
    "OMPI_MCA_osc", "OMPI_MCA_pml", "OMPI_MCA_smsc",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "UCX_TLS",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LD_LIBRARY_PATH",
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OPAL_PREFIX",
    "PATH",
    "PMIX_PREFIX",
    "PRTE_PREFIX",
)


def test_a_child_job_keeps_the_users_variables_and_not_the_launchers():
    environ = dict.fromkeys((*_LEFT, *_OF_THE_USER, *_WITHOUT_EFFECT), "x")
    assert set(without_launcher(environ)) == {*_OF_THE_USER, *_WITHOUT_EFFECT}
    assert tuple(device_settings(environ)) == _OF_THE_USER


def test_a_library_that_the_launcher_does_not_start_is_a_problem():
    open_mpis, mpichs = "mpirun (Open MPI)", "mpiexec (Hydra)"
    for launcher, library, size in (
        (open_mpis, MPICH, 2),
        (open_mpis, MPICH, 1),
        (mpichs, OPEN_MPI, 2),
    ):
        problem = library_problem(Launch(launcher, size, 0), library)
        assert problem is not None and launcher in problem and "MPI4PY_LIBMPI" in problem
    # Open MPI makes a world of one of a rank that it cannot connect. Slurm starts both, by --mpi.
    for launcher, library, size in (
        (open_mpis, OPEN_MPI, 2), (mpichs, MPICH, 2), (mpichs, OPEN_MPI, 1), ("srun", MPICH, 4),
        ("srun", OPEN_MPI, 4), ("python", MPICH, None), ("flux run", OPEN_MPI, 4),
    ):  # fmt: skip
        assert library_problem(Launch(launcher, size, 0), library) is None, (launcher, library)


def test_a_job_script_numbers_programs():
    assert program_number({}) is None
    assert program_number({"MPIDIST_APPNUM": "2"}) == 2
    assert without_launcher({"MPIDIST_APPNUM": "2"}) == {}
    for text in ("", "-1", "one", "²"):
        with pytest.raises(ValueError, match="MPIDIST_APPNUM must be a program's number"):
            program_number({"MPIDIST_APPNUM": text})


def test_a_job_is_named_by_the_first_variable_that_is_set():
    assert job_name({"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "x"}, "here") == "7"
    assert job_name({"MPIDIST_JOB": "../a b", "SLURM_JOB_ID": "7"}, "here") == ".._a_b"
    assert job_name({"SLURM_JOB_ID": ""}, "node3-77") == "node3-77"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}, "7.1"),
        # By mpirun in a step of one task.
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "1",
                "PMIX_NAMESPACE": "prterun-a-9@1",
            },
            "7.prterun-a-9_1",
        ),
        ({"PBS_JOBID": "7.server", "PMI_SIZE": "2"}, "7.server.node3-77"),
        ({"SLURM_JOB_ID": "7"}, "7.node3-77"),
        ({"PMIX_NAMESPACE": "x"}, "x"),
        ({"MPIDIST_JOB": "run", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}, "run"),
        ({}, "node3-77"),
    ],
)
def test_starts_of_one_batch_job_have_names_of_their_own(environ, name):
    assert start_name(environ, "node3-77") == name


def test_long_names_of_one_beginning_stay_different():
    names = ["n" * 90 + end for end in "ab"]
    first, second = (job_name({"MPIDIST_JOB": name}, "") for name in names)
    assert first != second and len(first) == len(second) == 80
    assert in_file_names(names[0]) == first and in_file_names("n" * 80) == "n" * 80
