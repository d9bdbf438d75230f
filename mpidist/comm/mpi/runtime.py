"""One world per process: the communicator that all others descend from, who ends the job, and what happens at exit.

This is the only module that names MPI's ``COMM_WORLD``. The world carries a generation number,
because it can be rebuilt without the dead after a failure; nothing may keep its communicator, rank
or size at import.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpidist.comm.mpi import cuda_context, launcher_env, trust
from mpidist.comm.mpi.library import MPI, is_started
from mpidist.comm.mpi.serialized import serialized
from mpidist.errors import CommTimeout, LaunchError, MpidistError

_ABORT_CODE = 1
_INT = struct.Struct("<q")
_DRAIN_S = 5.0  # how long the exit waits for operations that were started and never waited for
_FINALIZE_S = 5.0  # what MPI's own end may take after that
# "1": an uncaught exception also prints the stacks of all threads
_ENV_ALL_THREADS = "MPIDIST_ALL_THREADS"

_lock = threading.RLock()
_world: World | None = None
# What owns threads, and its stage: its close(timeout_s) runs before MPI ends.
_at_exit: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_reports: dict[str, str] = {}  # printed by a rank of the job: what stands for them from then on
_unfinished: Unfinished | None = None


@dataclass(frozen=True)
class World:
    """The ranks of this job and the communicator that every other one is made from."""

    comm: Any  # a duplicate of MPI_COMM_WORLD, or a wrapper that admits one thread at a time
    generation: int  # counts rebuilds after a failure
    rank: int
    size: int
    local_rank: int  # index among the ranks that share this node's memory
    local_size: int
    launcher: str
    thread_level: int
    highest_tag: int
    # for each rank the number of the node whose memory it shares, in the order of their first ranks
    nodes: tuple[int, ...]
    pid: int = field(default_factory=os.getpid)

    @property
    def is_single_node(self) -> bool:
        """Say whether all ranks share one node's memory."""
        return self.local_size == self.size

    def nodes_of(self, world_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return for each of these ranks the number of its node, in the order of their first ranks."""
        return _numbered(self.nodes[rank] for rank in world_ranks)


@dataclass
class Unfinished:
    """Business of this process that MPI's own end could wait for in vain.

    Attributes:
        dead: World ranks that died (ULFM).
    """

    dead: set[int] = field(default_factory=set)


def world(timeout_s: float | None = None) -> World:
    """Return the world, starting MPI on the first call.

    Collective: the first call, by all ranks of the job.

    Args:
        timeout_s: How long the first call waits for the other ranks; None for no limit. A rank that
            never starts MPI is waited for inside MPI_Init, which nothing can end but the launcher.

    Raises:
        LaunchError: The launcher started more tasks than MPI sees, MPI's thread level is too low,
            or ``MPIDIST_TRUST`` cannot be read or differs between ranks (all ranks).
        CommTimeout: Not all ranks called it in time.
        MpidistError: Called in a process forked from a rank.
    """
    global _world
    current = _world
    if current is not None and current.pid == os.getpid():
        return current
    with _lock:
        if _world is None:
            _world = _start(timeout_s)
        elif _world.pid != os.getpid():
            raise MpidistError(
                "this process was forked from an MPI rank and cannot communicate; keep collectives "
                "and calls in the parent"
            )
        return _world


def is_initialized() -> bool:
    """Say whether this process has joined the world."""
    return _world is not None and is_started()


def local_rank() -> int:
    """Return this rank's index on its node, from the launcher's variables if MPI has not started, else from MPI."""
    if is_initialized():
        return world().local_rank
    told = launcher_env.from_environment(os.environ).local_rank
    return told if told is not None else world().local_rank


def device() -> Any:
    """Return the ``torch.device`` of this rank: its share of the node's CUDA devices, or the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def close_at_exit(owner: Any, stage: int = 0) -> None:
    """Have ``owner.close(timeout_s)`` called before MPI ends, those of stage 0 first; only weakly referenced."""
    _at_exit[owner] = stage


def note_failure(dead: Iterable[int] = ()) -> None:
    """Note that a call of MPI was left (``on_timeout="raise"``) or that ranks died: MPI's own end could wait for them for ever.

    Args:
        dead: World ranks. They make the job end with an error, however the others end.
    """
    global _unfinished
    if _unfinished is None:
        _unfinished = Unfinished()
    _unfinished.dead.update(dead)


def unfinished() -> Unfinished | None:
    """Return what this process has to mind at its end, or None."""
    return _unfinished


def note_report(text: str) -> None:
    """Note that a rank of the job has printed a report; this one prints its first sentence from now on."""
    text = text.rstrip()
    _reports[text] = f"{text.split('. ')[0]} (the report stands once in the job's output)"


def write_stderr(text: str) -> None:
    """Write to file descriptor 2, which torch's wrapper around ``sys.excepthook`` and pytest's capture do not redirect."""
    data = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def abort(message: str, code: int = _ABORT_CODE) -> None:
    """Say why on stderr and end every rank of the job; does not return."""
    rank = _own_rank()
    write_stderr(f"[rank {rank}] mpidist ends the job: {message}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _own_rank() -> int:
    if _world is not None:
        return _world.rank
    return 0 if MPI.Is_finalized() else int(MPI.COMM_WORLD.Get_rank())


def guard_thread(target: Callable[..., None]) -> Callable[..., None]:
    """Wrap the body of one of our threads: an exception that leaves it ends the job, with its traceback.

    The thread's current CUDA device is that of the thread which calls this.
    """
    bind = cuda_context.inherited()

    def body(*args: Any) -> None:
        try:
            bind()
            target(*args)
        except BaseException as error:
            _end_job_for(type(error), error, f"in thread {threading.current_thread().name!r}")

    return body


def _start(timeout_s: float | None) -> World:
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        name = "MPI_THREAD_SINGLE" if level == MPI.THREAD_SINGLE else "MPI_THREAD_FUNNELED"
        raise LaunchError(
            f"MPI runs at {name}, but mpidist communicates from more than one thread and needs "
            "MPI_THREAD_MULTIPLE (or at least "
            "MPI_THREAD_SERIALIZED); leave mpi4py.rc.thread_level and MPI4PY_RC_THREAD_LEVEL at "
            "'multiple', "
            "or use an MPI library that was built with threads"
        )
    told = launcher_env.from_environment(os.environ)
    problem = launcher_env.singleton_problem(told, MPI.COMM_WORLD.Get_size())
    if problem:
        raise LaunchError(problem)
    highest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert isinstance(highest_tag, int)
    _install_hooks(MPI.COMM_WORLD.Get_size())
    comm: Any = _duplicate(timeout_s)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    # Truth about the node comes from MPI: Slurm's variables are inherited by ranks that mpirun
    # starts inside an allocation.
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    local_rank, local_size = node.Get_rank(), node.Get_size()
    nodes, problem = _told_by_all(comm, node)
    node.Free()
    if problem:
        raise LaunchError(problem)
    if level == MPI.THREAD_SERIALIZED:
        comm = serialized(comm)
    return World(
        comm,
        0,
        comm.Get_rank(),
        comm.Get_size(),
        local_rank,
        local_size,
        told.launcher,
        level,
        highest_tag,
        nodes,
    )


def _told_by_all(comm: Any, node: Any) -> tuple[tuple[int, ...], str | None]:
    """Return the number of each rank's node, and what is wrong with the settings that all must share. Collective: over both."""
    first = bytearray(_INT.pack(comm.Get_rank()))
    node.Bcast((first, len(first), MPI.BYTE), 0)
    mine = bytes(first) + _INT.pack(trust.code())
    every = bytearray(len(mine) * comm.Get_size())
    comm.Allgather((mine, len(mine), MPI.BYTE), (every, len(mine), MPI.BYTE))
    told = [number for (number,) in _INT.iter_unpack(every)]
    return _numbered(told[::2]), trust.problem(told[1::2])


def _numbered(keys: Iterable[int]) -> tuple[int, ...]:
    """Number equal keys alike, in the order in which they first come."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _duplicate(timeout_s: float | None) -> Any:
    """Return a communicator like MPI_COMM_WORLD.

    Collective: over all ranks, each of which waits until all have come.
    """
    comm, request = MPI.COMM_WORLD.Idup()
    start, pause_s = time.monotonic(), 20e-6
    while not request.Test():
        if timeout_s is not None and time.monotonic() - start > timeout_s:
            raise CommTimeout(
                f"rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}: init waits for "
                "all ranks of the job; not all "
                f"came within {timeout_s:g} s"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 5e-3)
    return comm


def _install_hooks(size: int) -> None:
    # MPI deletes the attributes of COMM_SELF first of all when it ends (MPI-4.1 §11.2.4), so a
    # user's own MPI_Finalize stops our threads, too. At exit we delete it ourselves, while Python
    # still runs; mpi4py registered its MPI_Finalize earlier.
    key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: _close_all())
    MPI.COMM_SELF.Set_attr(key, True)
    atexit.register(_delete_attribute, key)
    if size == 1:
        return
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _end_job_for(kind, error, "uncaught")
        previous(kind, error, trace)

    sys.excepthook = excepthook


def _end_job_for(kind: type[BaseException], error: BaseException, where: str) -> None:
    lines = "".join(traceback.format_exception(kind, error, error.__traceback__))
    for report, first in _reports.items():
        lines = lines.replace(report, first)
    prefix = f"[rank {_own_rank()}] "
    write_stderr("".join(prefix + line + "\n" for line in lines.rstrip().split("\n")))
    if os.environ.get(_ENV_ALL_THREADS) == "1":
        faulthandler.dump_traceback(file=2, all_threads=True)
    abort(f"{kind.__name__} {where}")


def _delete_attribute(key: int) -> None:
    if not MPI.Is_finalized() and MPI.COMM_SELF.Get_attr(key):
        MPI.COMM_SELF.Delete_attr(key)
        if _unfinished is not None:
            _end_with(_unfinished)


def _end_with(business: Unfinished) -> None:
    """End MPI where that may hang: it has requests whose peers never come, or connections to the dead."""
    assert _world is not None
    if business.dead:
        names = ", ".join(map(str, sorted(business.dead)))
        write_stderr(
            f"[rank {_world.rank}] mpidist ends this process with status {_ABORT_CODE}: rank "
            f"{names} of its job died\n"
        )
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    # By a thread outside Python: MPI.Finalize keeps Python's lock.
    faulthandler.dump_traceback_later(_FINALIZE_S, exit=True)
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()
    if business.dead:
        # A handler at exit cannot change the exit status otherwise, and mpirun itself forgives a
        # death under ULFM.
        os._exit(_ABORT_CODE)


def _close_all() -> None:
    if _world is None or _world.pid != os.getpid() or MPI.Is_finalized():
        return
    deadline = time.monotonic() + _DRAIN_S
    for owner, _ in sorted(_at_exit.items(), key=lambda item: item[1]):
        owner.close(max(deadline - time.monotonic(), 0.1))
