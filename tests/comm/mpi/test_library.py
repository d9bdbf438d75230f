"""Loading of the MPI library, and errors before MPI starts."""

import sys
from types import SimpleNamespace

import pytest

from mpidist.comm.mpi import library
from mpidist.errors import LaunchError, MpidistError
from tests.tools.support import started


@pytest.mark.parametrize(
    ("file", "mark", "names"),
    [
        (
            "MPI.mpich.cpython-311.so",
            "OMPI_COMM_WORLD_SIZE",
            ["mpirun (Open MPI)", "is MPICH", "MPI4PY_LIBMPI"],
        ),
        (
            "MPI.openmpi.cpython-311.so",
            "MPI_LOCALNRANKS",
            ["mpiexec (Hydra)", "is Open MPI", "MPI4PY_LIBMPI"],
        ),
    ],
)
def test_a_library_that_the_launcher_cannot_start_is_refused_before_it_starts(
    file, mark, names, monkeypatch
):
    for name in ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    library._require_matching_launcher(f"/somewhere/{file}")  # no launcher
    monkeypatch.setenv(mark, "2")
    with pytest.raises(LaunchError) as raised:
        library._require_matching_launcher(f"/somewhere/{file}")
    assert all(name in str(raised.value) for name in names), str(raised.value)


def test_a_file_that_hides_mpi4py_is_not_a_missing_library(tmp_path):
    (tmp_path / "mpi4py.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mpidist.comm.mpi import "
        "library; library.load()"
    )
    done = started([sys.executable, "-c", code], 60)
    assert (
        "LaunchError: 'import mpi4py' finds" in done.stderr and "rename that file" in done.stderr
    ), done.stderr
    code = "from mpidist.comm.mpi import library; library.load()"
    done = started([sys.executable, "-c", code], 60, {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    assert "LaunchError: no MPI library could be loaded" in done.stderr, done.stderr


def test_a_child_of_multiprocessing_is_no_rank(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    with pytest.raises(MpidistError, match="started by multiprocessing within an MPI rank"):
        library.load()


def test_full_shared_memory_warns_before_mpi_starts(monkeypatch):
    monkeypatch.setattr(
        library.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=16, f_frsize=4096)
    )
    with pytest.warns(RuntimeWarning, match="/dev/shm has 64 KiB left"):
        library._warn_of_full_memory("/dev/shm")
    monkeypatch.setattr(
        library.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=1 << 20, f_frsize=4096)
    )
    library._warn_of_full_memory("/dev/shm")
    monkeypatch.undo()
    library._warn_of_full_memory("/there is no such folder")
