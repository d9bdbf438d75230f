"""MPI library that Python would load: ABI, version, file and launcher. Loaded, but not started.

MPI_Get_library_version may be called before MPI_Init (MPI-4.1 §11.4.1), so a program that only
starts jobs can read the version.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass

from mpidist.comm.discovery import child_job
from mpidist.comm.mpi import library
from mpidist.comm.mpi.launcher_env import OPEN_MPI
from mpidist.errors import LaunchError

_LONGEST_TEXT = 8192  # MPI_MAX_LIBRARY_VERSION_STRING: 256 in Open MPI, 8192 in MPICH


@dataclass(frozen=True)
class Installed:
    """One MPI library.

    Attributes:
        abi: ``launcher_env.OPEN_MPI`` or ``launcher_env.MPICH``, which means all libraries of its
            ABI.
        text: The library's description of itself, all lines; "" if it must be started first.
        file: Path of its ``libmpi``; "" if it is linked in.
        mpirun: Path of its mpirun or mpiexec; "" if none was found.
    """

    abi: str
    text: str
    file: str
    mpirun: str

    @property
    def name(self) -> str:
        """First line of its description."""
        return " ".join(self.text.split("\n")[0].split())


def installed() -> Installed:
    """Load the library that ``import mpi4py.MPI`` would start; return its description.

    Raises:
        LaunchError: No library could be loaded; the text has the ways to install one.
    """
    try:
        extension = library.extension_file()
        abi = library.abi_of(extension)
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, LaunchError):
            raise
        raise library.no_library(error) from error
    file = library_file()
    return Installed(
        abi, _text_of(file or extension), file, child_job.find_launcher(abi == OPEN_MPI) or ""
    )


def library_file() -> str:
    """Return the path of the loaded ``libmpi``, else of MPI4PY_LIBMPI; "" without either."""
    return str(next(iter(child_job.library_files()), ""))


def _text_of(file: str) -> str:
    text, length = ctypes.create_string_buffer(_LONGEST_TEXT + 1), ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(file).MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace").strip()
