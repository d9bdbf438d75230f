"""Mark of a rank in its environment, for the programs that it starts.

A program that a rank starts inherits the launcher's variables. MPI takes it for the rank itself and
hangs, aborts, or makes a second world of it, unless a launcher of its own has started it: that one
has replaced the variables, or, with Hydra, the socket of which one is the number.
"""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping

from mpidist.comm.mpi import launcher_env

VARIABLE = "MPIDIST_RANK_MARK"

# What tells a rank from all others of the node, in the launchers' variables.
_PLACE = (
    "PMIX_NAMESPACE", "PMIX_RANK", "PMI_JOBID", "PMI_PORT", "PMI_RANK", "PMI_FD",
    "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_APID", "PALS_RANKID",
    "FLUX_JOB_ID", "FLUX_TASK_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID",
)  # fmt: skip


def leave(environ: MutableMapping[str, str]) -> None:
    """Mark the environment of this process, a rank in which MPI has started."""
    # Slurm's own variables are inherited by all of a step, and MPI may have started without them.
    is_connected = any(name in environ for name in _PLACE if not name.startswith("SLURM"))
    if is_connected and launcher_env.is_rank(environ):
        environ[VARIABLE] = f"{os.getpid()} {_socket(environ)} {_place(environ)}"


def is_of_parent(environ: MutableMapping[str, str]) -> bool:
    """Return whether a rank has started this process, and no launcher has since."""
    mark = environ.get(VARIABLE)
    if mark is None:
        return False
    pid, socket, place = mark.split(" ", 2)
    is_same = place == _place(environ) and _socket(environ) in (0, int(socket))
    return is_same and int(pid) != os.getpid()


def _place(environ: MutableMapping[str, str]) -> str:
    return ",".join(f"{name}={environ[name]}" for name in _PLACE if name in environ)


def _socket(environ: MutableMapping[str, str]) -> int:
    """Return the inode of the socket to the launcher; 0 if none is open."""
    try:
        found = os.fstat(int(environ["PMI_FD"]))
    except (KeyError, ValueError, OSError):
        return 0
    # The program may have opened a file of this number.
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0
