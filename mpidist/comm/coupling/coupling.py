"""Coupling: the programs of one job, each with a communicator of its own, and ways between them.

Programs under one launcher share MPI_COMM_WORLD. They agree on who belongs to which program by one
MPI_Allgather of two MPI_INT (number of the program; digest of the arguments, or 0), and each pair
of programs makes an intercommunicator (MPI-4.1 §7.6). A program in C or Fortran makes the same
three calls.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import cast

import numpy as np

from mpidist.comm.coupling import roles
from mpidist.comm.coupling.inlet import Inlet
from mpidist.comm.coupling.link import Link
from mpidist.comm.coupling.messages import MOST_NUMBER
from mpidist.comm.coupling.outlet import Outlet
from mpidist.comm.mpi import launcher_env, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.world import thread_level_problem
from mpidist.errors import DisagreementError, GroupError, LaunchError

# Of MPI_Intercomm_create between programs a < b, to which a and b are added: a·_PROGRAMS + b.
FIRST_TAG = 7000
_PROGRAMS = 64
_REFUSED = -1  # number of a process whose arguments were wrong


class Coupling:
    """The programs of one job.

    Attributes:
        program: Name of this process's program.
        programs: World ranks of each program's processes, in the order of the programs.
        comm: Communicator of mpi4py of this program's processes; for ``mpidist.comm.init(comm=)``.
    """

    def __init__(
        self, program: str, programs: dict[str, tuple[int, ...]], comm: MPI.Comm,
        links: dict[str, MPI.Intercomm], timeout_s: float | None,
    ) -> None:  # fmt: skip
        self.program = program
        self.programs = programs
        self.comm = comm
        self._links = links
        self._timeout_s = timeout_s
        self._outlets: dict[str, Outlet] = {}
        self._inlets: dict[str, Inlet] = {}

    def outlet(self, program: str) -> Outlet:
        """Return the end at which this process sends samples to another program; local.

        Raises:
            ValueError: No other program has that name.
        """
        if program not in self._outlets:
            self._outlets[program] = Outlet(self._link(program))
        return self._outlets[program]

    def inlet(self, program: str, depth: int = 2) -> Inlet:
        """Return the end at which this process receives samples of another program; local.

        Args:
            program: Name of the program.
            depth: Samples of each sender that are received in advance; the memory that they take
                bounds how far a fast sender gets ahead. The first call's counts.

        Raises:
            TypeError: The depth is no int.
            ValueError: No other program has that name, or a depth below 1 or past an int64.
        """
        samples = operator.index(depth)
        if not 1 <= samples <= MOST_NUMBER:
            raise ValueError(f"inlet needs a depth of at least 1, an int64; got {depth}")
        if program not in self._inlets:
            self._inlets[program] = Inlet(self._link(program), samples, self._timeout_s)
        return self._inlets[program]

    def close(self) -> None:
        """Close all outlets, then all inlets.

        Blocks: as their ``close``.
        """
        for outlet in self._outlets.values():
            outlet.close()
        for inlet in self._inlets.values():
            inlet.close()

    def __enter__(self) -> Coupling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the other programs may never call again.
        if kind is None:
            self.close()

    def _link(self, program: str) -> Link:
        if program not in self._links:
            raise ValueError(
                f"no other program is named {program!r}; this one is {self.program!r}, the others "
                f"are {sorted(self._links)}"
            )
        own, other = self.programs[self.program], self.programs[program]
        partners = roles.partners(self.comm.Get_rank(), len(own), len(other))
        return Link(self._links[program], self.program, program, partners, self._timeout_s)


def couple(
    groups: Mapping[str, int] | Sequence[str],
    *,
    comm: MPI.Intracomm | None = None,
    timeout_s: float | None = None,
) -> Coupling:
    """Tell the programs of one job apart, and connect them.

    Collective: over all processes of the job. Programs in C or Fortran call MPI_Allgather,
    MPI_Comm_split and MPI_Intercomm_create instead (docs/several-programs.md).

    Args:
        groups: The programs' names in the order of the launcher's command line (``mpirun -n 2
            simulation : -n 2 python train.py``), which numbers them (MPI_APPNUM, or the variable
            MPIDIST_APPNUM of ``couple.sbatch``); or the number of processes of each, which follow
            each other by rank, for launchers that number none. The same in all processes.
        comm: Communicator of all processes; MPI_COMM_WORLD if None.
        timeout_s: How long ``put``, ``get`` and ``close`` wait; None for no limit.

    Raises:
        TypeError, ValueError: Names, numbers or a limit that cannot be, or are not the job's.
        LaunchError: Names alone where the launcher numbers no programs, or MPI runs below
            MPI_THREAD_MULTIPLE.
        DisagreementError: Other groups in another process, or it refused its own (all others).
        GroupError: ``comm`` is an intercommunicator.
    """
    job = runtime.processes_of_job() if comm is None else comm
    if job.Is_inter():
        raise GroupError("couple got an intercommunicator as comm")
    rank, error, names, own, digest = job.Get_rank(), None, [], _REFUSED, 0
    try:
        # An inlet's thread and the program's call MPI at the same time.
        if problem := thread_level_problem([MPI.Query_thread()]):
            raise LaunchError(problem)
        _require_limit(timeout_s)
        # A set has another order in each process, and an iterator is read once.
        if isinstance(groups, str) or not isinstance(groups, (Mapping, Sequence)):
            raise TypeError(f"couple needs a list of names, or a dict; got {groups!r}")
        names = list(groups)
        own, digest = _number(groups, names, job), _digest(groups)
    except Exception as wrong:
        # The others must not wait for this process.
        error = wrong
    found = np.empty((job.Get_size(), 2), np.intc)
    job.Allgather(np.array([own, digest], np.intc), found)
    if error is not None:
        raise error
    numbers = found[:, 0].tolist()
    _require_agreement(numbers, found[:, 1].tolist(), digest)
    roles.require_programs(names, numbers)
    members = [tuple(r for r, one in enumerate(numbers) if one == k) for k in range(len(names))]
    program_comm = cast("MPI.Intracomm", job.Split(own, rank))
    links = {}
    # All processes go through the pairs in one order, so the first pair that waits can go on.
    for low, high in itertools.combinations(range(len(names)), 2):
        if own in (low, high):
            other = high if own == low else low
            tag = FIRST_TAG + low * _PROGRAMS + high
            links[names[other]] = program_comm.Create_intercomm(0, job, members[other][0], tag)
    programs = dict(zip(names, members, strict=True))
    return Coupling(names[own], programs, program_comm, links, timeout_s)


def _number(
    groups: Mapping[str, int] | Sequence[str], names: Sequence[str], job: MPI.Intracomm
) -> int:
    """Return the number of this process's program."""
    roles.require_names(names)
    if len(names) > _PROGRAMS:
        raise ValueError(f"couple connects at most {_PROGRAMS} programs; got {len(names)}")
    if isinstance(groups, Mapping):
        return roles.numbers(groups, job.Get_size())[job.Get_rank()]
    number = launcher_env.program_number(os.environ)
    if number is None:
        number = job.Get_attr(MPI.APPNUM)
    if number is None:
        raise LaunchError(
            "couple got names of programs, but the launcher has numbered none (MPI_APPNUM): give "
            "the number of processes of each, couple({'simulation': 2, 'train': 2})"
        )
    return int(number)


def _require_limit(timeout_s: object) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"couple needs seconds as timeout_s, or None; got {timeout_s!r}")
    if not 0 <= timeout_s <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"couple needs a timeout_s of 0 to {threading.TIMEOUT_MAX:.0f} s, or None; got "
            f"{timeout_s}"
        )


def _digest(groups: Mapping[str, int] | Sequence[str]) -> int:
    """Return a positive number of the groups, the same in every process that gives the same."""
    text = repr(list(groups.items()) if isinstance(groups, Mapping) else list(groups))
    return zlib.crc32(text.encode()) >> 2 or 1


def _require_agreement(numbers: Sequence[int], digests: Sequence[int], own: int) -> None:
    refused = [rank for rank, number in enumerate(numbers) if number == _REFUSED]
    if refused:
        raise DisagreementError(f"couple was refused in the processes {refused} of the job")
    # A program without this library gives 0.
    others = [rank for rank, digest in enumerate(digests) if digest not in (0, own)]
    if others:
        raise DisagreementError(
            f"couple got other groups in the processes {others} of the job than in this one"
        )
