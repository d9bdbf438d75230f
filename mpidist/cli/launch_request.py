"""Inputs of a launch plan: the user's request and the launchers that a machine offers; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mpidist.comm.mpi.launcher_env import OPEN_MPI

BINDINGS = ("none", "core", "socket", "numa")
# Nodes that other batch systems than Slurm give to mpirun: PBS, LSF, Grid Engine.
_OTHER_ALLOCATIONS = ("PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")


@dataclass(frozen=True)
class Request:
    """A user's request for a job.

    Attributes:
        program: Command line of one rank.
        ranks: Number of ranks; None for the number of tasks of the Slurm allocation.
        nodes: Nodes of the Slurm allocation to use; None for no limit.
        hosts: Names of nodes outside Slurm, for mpirun.
        hostfile: File with these names; "" without one.
        binding: One of ``BINDINGS``; "" for the default: srun binds as the site does, mpirun does
            not bind.
        tags: Each line of output begins with the rank.
        ulfm: A group survives the death of a rank (Open MPI 5).
        heartbeat: With ``ulfm``: a process that is stopped counts as dead.
        spares: Processes beside the ranks that wait for the death of one (``elastic.run``).
        mpi_type: Type of ``srun --mpi``; "" for the automatic choice.
    """

    program: tuple[str, ...]
    ranks: int | None = None
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    binding: str = ""
    tags: bool = False
    ulfm: bool = False
    heartbeat: bool = False
    spares: int = 0
    mpi_type: str = ""


@dataclass(frozen=True)
class Site:
    """MPI library and launchers of a machine.

    Attributes:
        abi: ABI of the MPI library that Python loads, ``openmpi`` or ``mpich``.
        library: Version text of the library.
        library_file: Path of the library.
        mpirun: Path of the library's launcher; "" without one.
        srun: Path of srun; "" without one.
        mpi_types: Types that ``srun --mpi=list`` prints.
        cores: Number of physical cores that this process may use.
        is_root: The user is root.
        home: Home folder for a launcher, if the environment has none.
        shm_free_bytes: Free bytes of ``/dev/shm``; -1 without one.
    """

    abi: str
    library: str
    library_file: str
    mpirun: str
    srun: str
    mpi_types: tuple[str, ...]
    cores: int
    is_root: bool
    home: str = ""
    shm_free_bytes: int = -1

    @property
    def open_mpi_major(self) -> int:
        """Major version of Open MPI; 0 for another library or an unknown version."""
        found = re.search(r"Open MPI v?(\d+)", self.library)
        return int(found[1]) if self.abi == OPEN_MPI and found else 0


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this process is within a Slurm job, so that srun can start ranks."""
    return "SLURM_JOB_ID" in environ


def is_one_node(request: Request, environ: Mapping[str, str]) -> bool:
    """Return whether all ranks are known to be on this node.

    In other batch systems than Slurm mpirun alone knows the nodes.
    """
    if request.hosts or request.hostfile:
        return False
    if in_allocation(environ):
        return environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
    return not any(map(environ.get, _OTHER_ALLOCATIONS))


def has_children(request: Request, environ: Mapping[str, str]) -> bool:
    """Return whether mpirun has a child process as long as a rank of the job lives.

    They are the ranks of this node, and the srun that has started the daemons of others. By ssh, or
    in other batch systems, a daemon is no child of mpirun.
    """
    return in_allocation(environ) or is_one_node(request, environ)
