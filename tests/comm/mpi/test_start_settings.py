"""Settings of Open MPI's start, by the launcher's variables; pure."""

from types import SimpleNamespace

import pytest

from mpidist.comm.mpi.launcher_env import is_on_one_node
from mpidist.comm.mpi.library import _home_for_start, home, start_settings

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


@pytest.mark.parametrize(
    ("where", "text", "is_set"),
    [
        ("home", "# btl = self\nbtl_tcp_if_include = eth0\n", False),
        ("home", "mpi_yield_when_idle = 1\n  btl = self,sm,tcp\n", True),
        ("site", "btl=^openib\n", True),
        ("prefix", "btl = ^uct\n", True),
        (None, "", False),
    ],
)
def test_a_transport_of_the_user_or_the_site_stays(tmp_path, where, text, is_set):
    """Else a job on one node starts without btl/ofi, which sleeps for a second."""
    folders = {
        "home": tmp_path / "home" / ".openmpi",
        "site": tmp_path / "mpi" / "etc",
        "prefix": tmp_path / "opal" / "etc",
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    mpirun = tmp_path / "mpi" / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.touch(mode=0o755)
    if where is not None:
        name = "mca-params.conf" if where == "home" else "openmpi-mca-params.conf"
        (folders[where] / name).write_text(text)
    environ = {
        "HOME": str(tmp_path / "home"),
        "PATH": str(mpirun.parent),
        "OPAL_PREFIX": str(tmp_path / "opal"),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    with start_settings(environ):
        assert environ.get("OMPI_MCA_btl") == (None if is_set else "^ofi")
    assert "OMPI_MCA_btl" not in environ


def test_a_missing_home_is_the_users_or_the_root_folder(monkeypatch, tmp_path):
    assert home({"HOME": "/mine"}) == "/mine"
    entry = SimpleNamespace(pw_dir=str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: entry)
    assert home({}) == home({"HOME": ""}) == str(tmp_path)
    entry.pw_dir = "/nonexistent"
    assert home({}) == "/"

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert home({}) == "/"


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "/mine"}])
def test_a_home_is_there_while_mpi_starts_alone(environ):
    before = dict(environ)
    with _home_for_start(environ):
        assert environ["HOME"] == home(before) != ""
    assert environ == before
