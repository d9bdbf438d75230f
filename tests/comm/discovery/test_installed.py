"""MPI library that Python would load, without starting it."""

import sys
from pathlib import Path

import pytest

from mpidist.comm.discovery import installed
from mpidist.comm.mpi import library
from mpidist.errors import LaunchError
from tests.tools.support import started


def test_the_library_is_known_before_it_starts():
    """Runs in a separate process, because another test of this one may have started MPI."""
    code = """
        import sys
        from mpidist.comm.discovery import installed
        found = installed.installed()
        from mpi4py import rc
        rc.initialize = False
        from mpi4py import MPI
        text = MPI.Get_library_version().replace(chr(0), "").strip()
        assert not MPI.Is_initialized() and found.text == text, found
        print(found.abi, found.file, found.name, found.mpirun, "torch" in sys.modules, sep="|")
    """
    done = started([sys.executable, "-c", "\n".join(line.strip() for line in code.split("\n"))], 60)
    assert done.returncode == 0, done.stderr
    abi, file, name, mpirun, has_torch = done.stdout.strip().split("|")
    assert Path(file).name.startswith("libmpi") and has_torch == "False"
    assert ("Open MPI" in name) == (abi == "openmpi") and (not mpirun or Path(mpirun).exists())


def test_no_library_is_an_error_that_names_the_ways(monkeypatch):
    def fails():
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(library, "extension_file", fails)
    with pytest.raises(
        LaunchError, match=r"cannot load MPI library\); load your cluster's MPI module"
    ):
        installed.installed()
    assert installed._text_of("/there/is/no/libmpi.so") == ""
