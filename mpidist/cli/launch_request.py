"""Inputs of a launch plan: the user's request and the launchers that a machine offers; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mpidist.comm.mpi.launcher_env import OPEN_MPI

BINDINGS = ("none", "core", "socket", "numa")


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        ranks: None: as many as the Slurm allocation has tasks.
        nodes: Nodes of a Slurm allocation to use; None for all that are needed.
        hosts: Names of nodes outside Slurm, for mpirun.
        hostfile: A file that names them; "" without one.
        binding: One of ``BINDINGS``; "" for the default: srun binds as the site does, mpirun does
            not bind.
        tags: Each line of output begins with its rank.
        ulfm: A group survives the death of a rank (Open MPI 5).
        mpi_type: Of srun's ``--mpi``; "" to choose.
        program: Command line of one rank.
    """

    program: tuple[str, ...]
    ranks: int | None = None
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    binding: str = ""
    tags: bool = False
    ulfm: bool = False
    mpi_type: str = ""


@dataclass(frozen=True)
class Site:
    """What the machine offers.

    Attributes:
        abi: Of the MPI library that Python loads, ``openmpi`` or ``mpich``.
        library: What it says of itself.
        library_file: Its path.
        mpirun: Path of its launcher; "" without one.
        srun: Path; "" without one.
        mpi_types: What ``srun --mpi=list`` names.
        cores: That this process may use; hardware threads of one core are one.
        is_root: The user is root.
    """

    abi: str
    library: str
    library_file: str
    mpirun: str
    srun: str
    mpi_types: tuple[str, ...]
    cores: int
    is_root: bool

    @property
    def open_mpi_major(self) -> int:
        """Major version of Open MPI; 0 of another library, or if it does not say."""
        found = re.search(r"Open MPI v?(\d+)", self.library)
        return int(found[1]) if self.abi == OPEN_MPI and found else 0


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Say whether srun can start ranks from here: within a Slurm job."""
    return "SLURM_JOB_ID" in environ


def is_one_node(request: Request, environ: Mapping[str, str]) -> bool:
    """Say whether all ranks are on this node."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1") if in_allocation(environ) else "1"
    return not request.hosts and not request.hostfile and nodes == "1"
