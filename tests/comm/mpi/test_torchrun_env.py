"""torchrun's variables, derived from a launcher's; pure."""

import pytest

from mpidist.comm.mpi.torchrun_env import SET_BY_US, disagreement, torch_variables

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]-ib,login1",
}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}
UNKNOWN = "rank0.mpidist.invalid"
NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPEN_MPI, ["3", "4", "1", "2", UNKNOWN, "29500"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}, ["0", "4", "1", "2", "node9", "29500"]),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            ["3", "4", "1", "4", "127.0.0.1", "29500"],
        ),
        (HYDRA, ["1", "2", "1", "2", "127.0.0.1", "29500"]),
        (SLURM, ["5", "7", "1", "2", "gpu07-ib", "29500"]),
        ({**SLURM, "SLURM_STEP_NODELIST": "node3,node5"}, ["5", "7", "1", "2", "node3", "29500"]),
        # Without a launcher's variable there is none of torchrun's; Flux sets no count of a node's
        # tasks.
        (FLUX, ["1", "2", "1", None, UNKNOWN, "29500"]),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2 each", "SLURM_STEP_NODELIST": ""},
            ["5", "7", "1", None, UNKNOWN, "29500"],
        ),
    ],
)
def test_variables_follow_the_launcher(environ, expected):
    found = torch_variables(environ, "node9")
    assert [found.get(name) for name in NAMES] == expected
    assert found[SET_BY_US].split(",") == [name for name in NAMES if name in found]


@pytest.mark.parametrize(
    "environ", [{}, {**OPEN_MPI, "TORCHELASTIC_RUN_ID": "x"}, {"PMI_SIZE": "2"}]
)
def test_nothing_is_set_for_others(environ):
    assert torch_variables(environ, "node9") == {}


def test_the_users_variables_stay_and_inherited_ones_of_ours_do_not():
    users = torch_variables({**OPEN_MPI, "RANK": "7", "MASTER_ADDR": "here"}, "node9")
    assert "RANK" not in users and "MASTER_ADDR" not in users and users["WORLD_SIZE"] == "4"
    # A child job of a rank: its ranks inherit the parent's variables.
    inherited = torch_variables(
        {**OPEN_MPI, **torch_variables(HYDRA, "node9"), "LOCAL_RANK": "1"}, "node9"
    )
    assert (inherited["RANK"], inherited["WORLD_SIZE"]) == ("3", "4")
    complete = {name: "1" for name in NAMES}
    assert torch_variables({**OPEN_MPI, **complete}, "node9") == {}


def test_variables_of_another_job_are_an_error():
    assert disagreement({}, 1, 2) is None
    assert disagreement({"RANK": "1", "WORLD_SIZE": "2"}, 1, 2) is None
    assert "RANK=0 is set, but MPI started this process as RANK=1" in (
        disagreement({"RANK": "0"}, 1, 2) or ""
    )
    assert "Unset WORLD_SIZE" in (disagreement({"RANK": "1", "WORLD_SIZE": "8"}, 1, 2) or "")
