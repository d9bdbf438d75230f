"""The process as a rank: joins a world, leaves it, aborts the job, and ends MPI at exit.

The world is that of all ranks at first use, unless the program has given a communicator. State of
other modules that belongs to the world registers here (``belongs_to_world``), and is dropped when
the process leaves it. This is the only module that names MPI's ``COMM_WORLD``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpidist.comm.mpi import (
    closed_communicators,
    cuda_context,
    exit_timer,
    launcher_env,
    rank_ranges,
    world_end,
)
from mpidist.comm.mpi.library import MPI, has_ulfm, is_open_mpi, is_started
from mpidist.comm.mpi.world import World, check_start, join, require_intracommunicator
from mpidist.errors import CommTimeout, MpidistError
from mpidist.weak_registry import WeakRegistry

if TYPE_CHECKING:
    import torch

_ABORT_CODE = 1
_DRAIN_S = 5.0  # longest wait at exit for operations that were started and never waited for
_FINALIZE_S = 5.0  # longest MPI_Finalize after that
_RECOVERED_S = 2.0  # the same after a recovery, where nothing but MPI is left to end
# On the world's communicators, for the barriers before they are freed.
_WORLD_END_TAG = 2
_EXIT_TAG = 3  # on the world's communicator, for the wait of its ranks before MPI ends
# "1": an uncaught exception also prints the stacks of all threads.
_ENV_ALL_THREADS = "MPIDIST_ALL_THREADS"

_lock = threading.RLock()
_world: World | None = None
_pid_of_rank: int | None = None  # the process that has joined a world
# State of modules, in the order of their imports: a module stands behind those that it uses.
_parts: list[_Part] = []
# Owners of threads, and their stages: close(timeout_s) is called before MPI ends.
_at_exit: defaultdict[int, WeakRegistry[Closable]] = defaultdict(WeakRegistry)  # by stage
# Reports that a rank has printed, and the short form that this rank prints instead.
_reports: dict[str, str] = {}
_unfinished: Unfinished | None = None
_before_end: Callable[[], None] | None = None  # of a job that a timeout ends
_record_end: Callable[[str, BaseException | None], None] | None = None
_error_of_all: BaseException | None = None


class Closable(Protocol):
    """Owner of a thread."""

    def close(self, timeout_s: float) -> None:
        """End the thread, within ``timeout_s`` if possible."""


class _Part(NamedTuple):
    """State of a module that belongs to the world.

    Attributes:
        drop: Ends its threads, gives up its communicators, and forgets the rest. Not collective.
        uses: Returns what the program still uses of it, in words.
        abandon: Ends these uses without the other ranks, some of which are dead.
        settle: Keeps its threads out of MPI while an agreement is there.
    """

    drop: Callable[[], None]
    uses: Callable[[], Sequence[str]]
    abandon: Callable[[], None]
    settle: Callable[[float | None], None]


@dataclass
class Unfinished:
    """Requests of this process for which MPI_Finalize could wait for ever.

    Attributes:
        dead: World ranks that died (ULFM).
        status: Of a job that has gone on after deaths (``note_recovery``), else None.
    """

    dead: set[int] = field(default_factory=set)
    status: int | None = None


def world(timeout_s: float | None = None) -> World:
    """Return the world; without one, join that of all ranks of the job, and start MPI.

    Collective: a call without a world, by all ranks of the job.

    Args:
        timeout_s: How long the first call waits for the other ranks; None for no limit. A rank that
            never starts MPI keeps the others inside MPI_Init, which only the launcher can end.

    Raises:
        LaunchError: The launcher started more tasks than MPI sees, MPI's thread level is too low,
            or ``MPIDIST_TRUST`` cannot be read or differs between ranks (all ranks).
        CommTimeout: Not all ranks called it in time.
        MpidistError: Called in a process forked from a rank.
    """
    current = _world
    if current is not None and current.pid == os.getpid():
        return current
    with _lock:
        return _world if _world is not None and _is_rank() else _join(MPI.COMM_WORLD, timeout_s)


def enter_world(comm: MPI.Comm, timeout_s: float | None = None) -> World:
    """Make a communicator's ranks the world of this process, and leave the world before.

    Collective: over the communicator, of which a duplicate is used.

    Args:
        comm: An intracommunicator of mpi4py; the ranks of the job outside of it take no part.
        timeout_s: How long the call waits for the communicator's other ranks; None for no limit.

    Raises:
        TypeError, ValueError: No communicator, a null one or an intercommunicator (this rank).
        GroupError: A rank still uses the world before: a group or RPC (all ranks of ``comm``).
        LaunchError, CommTimeout, MpidistError: As of ``world``.
    """
    require_intracommunicator(comm)
    with _lock:
        return _join(comm, timeout_s)


def leave_world() -> None:
    """Drop all state that belongs to this process's world; the next world begins with none.

    Ends the threads of the watchdog and of the store, gives up the world's communicators, and
    begins the counts of groups, clones and waits again. Groups must be closed and RPC shut down.
    Not collective: ranks that stay are told that this one has left. The next ``world`` is of all
    ranks of the job.
    """
    global _world, _before_end
    with _lock:
        if _world is None:
            return
        for part in reversed(_parts):
            part.drop()
        for comm in (_world.watchdogs, _world.comm):
            closed_communicators.add(comm, _WORLD_END_TAG)
        if _unfinished is not None:
            # Their numbers are those of the world that ends, whose survivors go on.
            _unfinished.dead.clear()
        _world = _before_end = None


def abandon_world() -> None:
    """End all that this process uses of its world, some of whose ranks have died, and leave it.

    Ends RPC, destroys torch's groups and closes the others, after which the process is as it was
    before it joined the world. Not collective. The waits of all threads must have been ended
    (``watchdog.interrupt``).
    """
    for part in reversed(_parts):
        part.abandon()
    leave_world()


def settle_world(timeout_s: float | None) -> None:
    """Have no thread of this library call MPI beside an agreement; what is open stays open.

    Waits for asynchronous operations of groups; a death ends the wait (``watchdog.interrupt``). RPC
    goes on, under the lock of agreements. Not collective.

    Args:
        timeout_s: Longest wait; None for no limit.
    """
    for part in reversed(_parts):
        part.settle(timeout_s)


def uses_of_world() -> list[str]:
    """Return what the program uses of its world, in words."""
    return [] if _world is None else [use for part in _parts for use in part.uses()]


def belongs_to_world(
    drop: Callable[[], None],
    uses: Callable[[], Sequence[str]] = lambda: (),
    abandon: Callable[[], None] = lambda: None,
    settle: Callable[[float | None], None] = lambda timeout_s: None,
) -> None:
    """Register state of a module that belongs to the world; called when the module is imported.

    Args:
        drop: Ends the state's threads, gives up its communicators, and forgets the rest; called by
            ``leave_world``, for modules before those that they import. Not collective.
        uses: Returns what the program still uses of the world, in words; anything keeps
            ``enter_world`` from leaving it.
        abandon: Ends these uses where ranks have died; called by ``abandon_world`` before any
            ``drop``, in the same order. Not collective.
        settle: Called by ``settle_world`` with its argument, in the same order. Not collective.
    """
    _parts.append(_Part(drop, uses, abandon, settle))


def processes_of_job() -> MPI.Intracomm:
    """Return the communicator of all processes of the job, in the world or not; starts MPI.

    From here on an uncaught exception of this process ends the job, and the end of the program ends
    MPI. Local.

    Raises:
        MpidistError: Called in a process forked from a rank.
    """
    global _pid_of_rank
    whole = MPI.COMM_WORLD
    if not _is_rank():
        _install_hooks(whole.Get_size())
        _pid_of_rank = os.getpid()
    return whole


def is_initialized() -> bool:
    """Return whether this process has joined the world."""
    return _world is not None and is_started()


def local_rank() -> int:
    """Return this rank's index on its node; before MPI starts, from the launcher's variables."""
    if is_initialized():
        return world().local_rank
    index = launcher_env.from_environment(os.environ).local_rank
    return index if index is not None else world().local_rank


def device() -> torch.device:
    """Return the ``torch.device`` of this rank: its share of the node's GPUs, or the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def close_at_exit(owner: Closable, stage: int = 0) -> None:
    """Register ``owner.close(timeout_s)`` for the end of MPI; lower stages are closed first.

    Args:
        owner: Held by a weak reference.
    """
    _at_exit[stage].add(owner)


def note_failure(dead: Iterable[int] = ()) -> None:
    """Record abandoned requests (``on_timeout="raise"``) or deaths: MPI_Finalize could hang.

    Args:
        dead: World ranks. With any, this process exits with an error, however the others exit.
    """
    global _unfinished
    if _unfinished is None:
        _unfinished = Unfinished()
    _unfinished.dead.update(dead)


def note_error_of_all(error: BaseException) -> None:
    """Record that all processes of the job raise an error alike, which none must tell the others.

    Where nobody handles it, each ends MPI and itself under ULFM: Open MPI's launcher may wait for
    ever after several calls of MPI_Abort, or ends without MPI_Finalize, at once.
    """
    global _error_of_all
    _error_of_all = error


def note_recovery(status: int) -> None:
    """Record that the job has gone on after deaths, and ends well: MPI_Finalize could hang.

    Args:
        status: Of this process, should it hang there.
    """
    note_failure()
    assert _unfinished is not None
    _unfinished.status = status


def unfinished() -> Unfinished | None:
    """Return the record of ``note_failure``, or None."""
    return _unfinished


def note_report(text: str) -> None:
    """Record that a rank has printed a report; this rank prints only its first sentence."""
    text = text.rstrip()
    _reports[text] = f"{text.split('. ')[0]} (the report stands once in the job's output)"


def before_timeout_ends_job(function: Callable[[], None]) -> None:
    """Have a function called once before an uncaught CommTimeout without a report ends the job."""
    global _before_end
    _before_end = function


def before_end(function: Callable[[str, BaseException | None], None]) -> None:
    """Have a function called before an uncaught exception or ``abort`` ends this process.

    Args:
        function: Takes the reason in words, and the exception if it is one.
    """
    global _record_end
    _record_end = function


def write_stderr(text: str) -> None:
    """Write to file descriptor 2, past torch's ``sys.excepthook`` and ``sys.stderr``."""
    data = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def abort(message: str, code: int = _ABORT_CODE) -> None:
    """Write the reason to stderr and end every rank of the job; does not return.

    In a forked child it ends that process alone.
    """
    _record(message)
    rank, is_child = _own_rank(), _is_child()
    what = "a process forked from the rank" if is_child else "the job"
    write_stderr(f"[rank {rank}] mpidist ends {what}: {message}\n")
    _flush()
    if not is_child and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def end_job_for_uncaught(kind: type[BaseException], error: BaseException) -> None:
    """End the job for an uncaught exception if the program has started MPI by mpi4py itself.

    Such a rank would otherwise wait in MPI_Finalize for ranks that wait for it. After this process
    has joined the world, its own hook ends the job.
    """
    module = sys.modules.get("mpi4py.MPI")
    if (
        _pid_of_rank is None
        and module is not None
        and module.Is_initialized()
        and not module.Is_finalized()
        and module.COMM_WORLD.Get_size() > 1
    ):
        _end_job_for(kind, error, "uncaught")


def guard_thread(target: Callable[..., None]) -> Callable[..., None]:
    """Wrap a thread's body: an uncaught exception ends the job, with its traceback.

    The thread's current CUDA device is the one of the thread that calls this function.
    """
    bind = cuda_context.inherited()

    def body(*args: object) -> None:
        try:
            bind()
            target(*args)
        except BaseException as error:
            _end_job_for(type(error), error, f"in thread {threading.current_thread().name!r}")

    return body


def _is_rank() -> bool:
    """Return whether this process has joined a world before.

    Raises:
        MpidistError: It was forked from a process that had.
    """
    if _is_child():
        raise MpidistError(
            "this process was forked from an MPI rank and cannot communicate; keep collectives "
            "and calls in the parent"
        )
    return _pid_of_rank is not None


def _is_child() -> bool:
    """Return whether this process was forked from one that had joined a world."""
    return _pid_of_rank is not None and _pid_of_rank != os.getpid()


def _join(comm: MPI.Comm, timeout_s: float | None) -> World:
    """Leave this process's world, if it has one, for that of a communicator."""
    global _world
    _is_rank()
    launch = check_start(MPI.COMM_WORLD)
    whole = processes_of_job()
    joined = join(comm, whole, launch, timeout_s, uses_of_world())
    leave_world()
    _world = joined
    return joined


def _own_rank() -> int:
    if _world is not None:
        return _world.rank
    return 0 if MPI.Is_finalized() else int(MPI.COMM_WORLD.Get_rank())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _install_hooks(size: int) -> None:
    # MPI deletes the attributes of COMM_SELF first when it ends (MPI-4.1 §11.2.4), so a user's own
    # MPI_Finalize stops the threads as well. At exit the attribute is deleted here, while Python
    # still runs; mpi4py registered its MPI_Finalize earlier and calls it later.
    key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: _close_all())
    MPI.COMM_SELF.Set_attr(key, True)
    atexit.register(_delete_attribute, key)
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        is_child = _is_child()
        if size > 1 and not is_child:
            _end_job_for(kind, error, "uncaught")
        _record(str(error), error)
        previous(kind, error, trace)
        # A forked child is no rank, and ends alone: not by mpi4py's MPI_Finalize at exit, which
        # waits for ever in it.
        if is_child:
            _flush()
            os._exit(_ABORT_CODE)

    sys.excepthook = excepthook


def _record(text: str, error: BaseException | None = None) -> None:
    # What fails here must not keep the reason from being printed.
    with contextlib.suppress(Exception):
        if _record_end is not None and _pid_of_rank == os.getpid():
            _record_end(text, error)


def _end_job_for(kind: type[BaseException], error: BaseException, where: str) -> None:
    _record(str(error), error)
    lines = "".join(traceback.format_exception(kind, error, error.__traceback__))
    for report, first in _reports.items():
        lines = lines.replace(report, first)
    prefix = f"[rank {_own_rank()}] "
    write_stderr("".join(prefix + line + "\n" for line in lines.rstrip().split("\n")))
    if os.environ.get(_ENV_ALL_THREADS) == "1":
        faulthandler.dump_traceback(file=2, all_threads=True)
    is_timeout = issubclass(kind, CommTimeout) and str(error) not in _reports
    if is_timeout and _before_end is not None and not _is_child():
        # An interrupt of the wait ends the job at once.
        with contextlib.suppress(KeyboardInterrupt):
            _before_end()
    if error is _error_of_all and has_ulfm() and not _is_child():
        _flush()
        with exit_timer.exiting_after(_FINALIZE_S, _ABORT_CODE):
            MPI.Finalize()
        os._exit(_ABORT_CODE)
    abort(f"{kind.__name__} {where}")


def _delete_attribute(key: int) -> None:
    if _is_child():
        return  # it has MPI's memory, and no MPI
    if not MPI.Is_finalized() and MPI.COMM_SELF.Get_attr(key):
        MPI.COMM_SELF.Delete_attr(key)
        if _unfinished is not None:
            _finalize_in_time(_unfinished)


def _finalize_in_time(unfinished: Unfinished) -> None:
    """End MPI where MPI_Finalize may hang: on requests without a peer, or dead connections."""
    if unfinished.dead:
        write_stderr(
            f"[rank {_own_rank()}] mpidist ends this process with status {_ABORT_CODE}: "
            f"{rank_ranges.named(unfinished.dead)} of its job died\n"
        )
        logging.shutdown()
        _flush()
    if unfinished.status is not None and not unfinished.dead:
        with exit_timer.exiting_after(_RECOVERED_S, unfinished.status):
            MPI.Finalize()
        return
    # The timer is a thread outside Python, because MPI.Finalize keeps Python's lock.
    faulthandler.dump_traceback_later(_FINALIZE_S, exit=True)
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()
    if unfinished.dead:
        # An atexit handler cannot change the exit status in another way, and under ULFM mpirun
        # accepts the death of a rank.
        os._exit(_ABORT_CODE)


def _close_all() -> None:
    if _pid_of_rank != os.getpid() or MPI.Is_finalized():
        return
    deadline = time.monotonic() + _DRAIN_S
    for stage in sorted(_at_exit):
        for owner in _at_exit[stage].alive():
            owner.close(max(deadline - time.monotonic(), 0.1))
    if _world is not None:
        _end_world(_world)


def _end_world(world: World) -> None:
    if is_open_mpi():
        return  # its MPI_Finalize waits by itself
    # After a failure the launcher ends the ranks that would wait for this one.
    limit_s = None if _unfinished is None else _FINALIZE_S
    if world_end.await_end(world.comm, _EXIT_TAG, limit_s) and _unfinished is None:
        world_end.drain((*closed_communicators.kept(), world.watchdogs, world.comm))
