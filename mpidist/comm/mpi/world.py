"""The world: communicator of its ranks, their nodes, and checks after MPI's start.

Its ranks are all of the job, or those of a communicator that the program gives. A process may leave
one world for another, so no module keeps its communicator, rank or size at import.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpidist.comm.mpi import (
    backoff,
    determinism,
    launcher_env,
    rank_ranges,
    revocation,
    torchrun_env,
    tracing,
    trust,
)
from mpidist.comm.mpi.launcher_env import Launch
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi
from mpidist.errors import CommTimeout, GroupError, LaunchError, MpidistError

# What each rank tells: first rank of its node, MPI's thread level, MPIDIST_TRUST,
# MPIDIST_DETERMINISTIC, whether it has MPIDIST_TRACE, whether it uses another world, process id,
# rank among all of the job, time, host, names of the job and of this start of it.
_ROW = struct.Struct("<qqqqqqqqq64s80s80s")
_INT = struct.Struct("<q")
_SLEEP_S = 1e-3  # between two tests whether all ranks have started


class Process(NamedTuple):
    """Process id and host of a rank, as the rank itself knows them."""

    pid: int
    host: str


@dataclass(frozen=True)
class World:
    """The ranks of this job that communicate, and the communicator from which others are made.

    Attributes:
        comm: A duplicate of MPI_COMM_WORLD, or of the communicator that the program gave.
        watchdogs: Another duplicate, for the messages of the watchdogs alone.
        rank: This rank.
        size: Number of ranks.
        local_rank: Index of this rank among the ranks that share its node's memory.
        local_size: Number of ranks that share this node's memory.
        launcher: Name of the launcher.
        highest_tag: MPI_TAG_UB.
        nodes: Node number of each rank; nodes are numbered in the order of their first ranks.
        adds_in_rank_order: Sums are in the order of the ranks (``determinism``).
        processes: Process of each rank.
        first: Rank 0's rank among all of the job; None if those are the world's ranks.
        key: Begins the keys of the world's groups; the same on all ranks, and no other world's,
            before it, beside it or of an earlier start of the job.
        job: Name of the job in file names, the same on all ranks and for all of its starts.
        start: Name of this start of the job, the same on all ranks.
        pid: The process that joined the world.
    """

    comm: Mpi
    watchdogs: Mpi
    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    highest_tag: int
    nodes: tuple[int, ...]
    adds_in_rank_order: bool = False
    processes: tuple[Process, ...] = ()
    first: int | None = None
    key: str = ""
    job: str = ""
    start: str = ""
    pid: int = field(default_factory=os.getpid)

    @property
    def is_single_node(self) -> bool:
        """Return whether all ranks share one node's memory."""
        return self.local_size == self.size

    @property
    def everyone(self) -> str:
        """Return the world's ranks in words."""
        return _everyone(is_job=self.first is None)

    def nodes_of(self, world_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the node number of each of these ranks, numbered by their first ranks."""
        return number_alike(self.nodes[rank] for rank in world_ranks)


def check_start(comm_world: MPI.Comm) -> Launch:
    """Return the launcher's variables, if MPI's size fits.

    Raises:
        LaunchError: The launcher started more tasks than MPI sees, or ``RANK`` and ``WORLD_SIZE``
            say several processes and MPI sees one.
    """
    launch = launcher_env.from_environment(os.environ)
    size = comm_world.Get_size()
    problem = launcher_env.singleton_problem(launch, size)
    if problem is None and size == 1:
        problem = torchrun_env.started_alone(os.environ)
    if problem:
        raise LaunchError(problem)
    return launch


def thread_level_problem(levels: Sequence[int]) -> str | None:
    """Return why MPI's thread levels, by rank, do not do; None if all are MPI_THREAD_MULTIPLE."""
    low = [rank for rank, level in enumerate(levels) if level != MPI.THREAD_MULTIPLE]
    if not low:
        return None
    names = {MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE", MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED"}
    name = names.get(min(levels), "MPI_THREAD_SERIALIZED")
    where = "" if len(low) == len(levels) else f" on {rank_ranges.named(low)}"
    return (
        f"MPI runs at {name}{where}, but mpidist calls it from several threads at once and needs "
        "MPI_THREAD_MULTIPLE; leave mpi4py.rc.thread_level and MPI4PY_RC_THREAD_LEVEL at "
        "'multiple' (a program that starts MPI itself: MPI_Init_thread), and if the library still "
        "gives less, allow it more (Cray MPICH: export MPICH_MAX_THREAD_SAFETY=multiple) or use "
        "one that was built with threads"
    )


def require_intracommunicator(comm: MPI.Comm) -> None:
    """Require a communicator that a world can be made of.

    Raises:
        TypeError: It is no communicator of mpi4py.
        ValueError: It is null or an intercommunicator.
    """
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"init needs a communicator of mpi4py as comm; got {type(comm).__name__}")
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "init got comm=MPI.COMM_NULL: the communicator was freed, or this rank is none of its "
            "members and must not call init"
        )
    if comm.Is_inter():
        raise ValueError(
            "init got an intercommunicator as comm; give the local group's communicator, or merge "
            "both groups (Intercomm.Merge)"
        )


def join(
    parent: MPI.Comm,
    whole: MPI.Comm,
    launch: Launch,
    timeout_s: float | None,
    uses: Sequence[str] = (),
) -> World:
    """Return the world of a communicator's ranks.

    Collective: over the communicator.

    Args:
        parent: MPI_COMM_WORLD, or a communicator of some of its ranks.
        whole: MPI_COMM_WORLD.
        launch: The result of ``check_start``.
        timeout_s: Longest wait for the other ranks; None for no limit.
        uses: What this process still uses of another world.

    Raises:
        CommTimeout: Not all ranks called it in time.
        LaunchError: MPI's thread level is too low on a rank, ``MPIDIST_TRUST`` or
            ``MPIDIST_DETERMINISTIC`` cannot be read or differs between ranks, or some have
            ``MPIDIST_TRACE`` (all ranks).
        GroupError: A rank still uses another world (all ranks).
    """
    is_job = parent.Get_size() == whole.Get_size()
    comm = _duplicate(parent, timeout_s, _everyone(is_job))
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    # Nobody else knows the duplicate yet.
    with revocation.on_error(comm):
        return _joined(comm, whole, launch, uses)


def _joined(comm: MPI.Comm, whole: MPI.Comm, launch: Launch, uses: Sequence[str]) -> World:
    # Nodes come from MPI and not from the environment: ranks that mpirun starts inside an
    # allocation inherit Slurm's variables.
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    local_rank, local_size = node.Get_rank(), node.Get_size()
    with revocation.on_error(node):
        nodes, processes, first, begun_ns, names, error = _gather_settings(
            comm, node, whole.Get_rank(), uses
        )
    node.Free()
    if error is not None:
        comm.Free()
        raise error
    # MPI keeps the attribute at MPI_COMM_WORLD alone.
    highest_tag = whole.Get_attr(MPI.TAG_UB)
    assert isinstance(highest_tag, int)
    return World(
        comm=comm,
        # Made here, where all ranks are: a group of some ranks of the job starts their watchdogs
        # without the others.
        watchdogs=comm.Dup(),
        rank=comm.Get_rank(), size=comm.Get_size(),
        local_rank=local_rank, local_size=local_size, launcher=launch.launcher,
        highest_tag=highest_tag, nodes=nodes,
        adds_in_rank_order=determinism.SETTING.code() in (determinism.ORDER, determinism.EXACT),
        processes=processes, first=None if comm.Get_size() == whole.Get_size() else first,
        # No process begins two worlds as rank 0 at one time.
        key=f"world{first}-{begun_ns:x}", job=names[0], start=names[1],
    )  # fmt: skip


def number_alike(keys: Iterable[int]) -> tuple[int, ...]:
    """Replace each key by a number from 0 on, in the order of first occurrence."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _gather_settings(
    comm: MPI.Comm, node: MPI.Comm, own: int, uses: Sequence[str]
) -> tuple[tuple[int, ...], tuple[Process, ...], int, int, list[str], MpidistError | None]:
    """Return each rank's node number and process, and the error that all ranks must raise.

    Before the error stand rank 0's rank among all of the job, its time, and its names of the job
    and of this start.

    Collective: over both communicators.

    Args:
        own: This rank's rank among all of the job.
    """
    first = bytearray(_INT.pack(comm.Get_rank()))
    node.Bcast((first, len(first), MPI.BYTE), 0)
    host = socket.gethostname().encode()
    otherwise = f"{socket.gethostname()}-{os.getpid()}"
    job = launcher_env.job_name(os.environ, otherwise).encode()
    start = launcher_env.start_name(os.environ, otherwise).encode()
    settings = trust.SETTING.code(), determinism.SETTING.code(), bool(tracing.file())
    level = MPI.Query_thread()
    mine = _ROW.pack(
        *_INT.unpack(first), level, *settings, bool(uses), os.getpid(), own, time.time_ns(), host,
        job, start,
    )  # fmt: skip
    gathered = bytearray(len(mine) * comm.Get_size())
    comm.Allgather((mine, len(mine), MPI.BYTE), (gathered, len(mine), MPI.BYTE))
    (nodes, levels, trusts, orders, traces, users, pids, job_ranks, times, hosts, jobs, starts
    ) = zip(*_ROW.iter_unpack(gathered), strict=True)  # fmt: skip
    names = [host.rstrip(b"\0").decode(errors="replace") for host in hosts]
    problem = (
        thread_level_problem(levels)
        or trust.SETTING.problem(trusts)
        or determinism.SETTING.problem(orders)
        or tracing.problem(traces)
    )
    error: MpidistError | None = LaunchError(problem) if problem else None
    if any(users):
        where = f"rank {comm.Get_rank()} of {comm.Get_size()}: init(comm=...)"
        ranks = rank_ranges.named([rank for rank, is_user in enumerate(users) if is_user])
        what = f" ({'; '.join(uses)})" if uses else ""
        error = GroupError(
            f"{where} is called while groups of another world are open on {ranks} of the new "
            f"one{what}; close them first"
        )
    processes = tuple(map(Process, pids, names))
    of_first = [name.rstrip(b"\0").decode() for name in (jobs[0], starts[0])]
    return number_alike(nodes), processes, job_ranks[0], times[0], of_first, error


def _everyone(is_job: bool) -> str:
    return "all ranks of the job" if is_job else "all ranks of its comm"


def _duplicate(parent: MPI.Comm, timeout_s: float | None, everyone: str) -> MPI.Comm:
    """Return a duplicate of a communicator.

    Collective: over it. Blocks: until all its ranks have called it.
    """
    comm, request = parent.Idup()
    if not backoff.until(request.Test, timeout_s=timeout_s, sleep_s=_SLEEP_S):
        raise CommTimeout(
            f"rank {parent.Get_rank()} of {parent.Get_size()}: init waits for {everyone}; not all "
            f"came within {timeout_s:g} s"
        )
    return comm
