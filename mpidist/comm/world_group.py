"""Groups made without another one, and the group that a ``process_group`` argument means."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpidist.comm import subgroups
from mpidist.comm.execution import group_state
from mpidist.comm.execution.group_settings import ABORT, GroupSettings
from mpidist.comm.execution.work import seconds
from mpidist.comm.group import ProcessGroup, open_groups
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.mpi import creation_barrier, runtime, tracing
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.world import require_intracommunicator
from mpidist.comm.subgroups import ENV_ON_TIMEOUT
from mpidist.comm.watchdog import watchdog
from mpidist.errors import GroupError

DEFAULT_TIMEOUT_S = 1800.0  # torch's default_pg_timeout

_default: ProcessGroup | None = None
_worlds = itertools.count(1)  # numbers of the groups of all ranks


def init(
    name: str = "world",
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    debug: bool | None = None,
    on_timeout: str | None = None,
    comm: MPI.Comm | None = None,
) -> ProcessGroup:
    """Return the group of all ranks of the job; start MPI if it has not started.

    Collective: the first call, over all ranks of the job or of ``comm``. Later calls return the
    same group until it is closed.

    Args:
        name: The name in messages.
        timeout: Seconds or a timedelta after which the watchdog reports a collective, and for which
            this call waits for the other ranks, but at least 60 s; None or 0 for no limit.
        debug: Compare the operations of all ranks before each collective; ``MPIDIST_DEBUG=1`` if
            None.
        on_timeout: ``"abort"``: a collective past its timeout, or one that waits for a rank that
            has ended, ends the job with a report. ``"raise"``: every rank of the group raises the
            report, as a ``CommTimeout`` or a ``RankFailureError``; the group has failed, every
            later call on it raises, and the program may save its state and end. All collectives are
            then non-blocking calls of MPI that the thread tests until they have ended. MPI may
            still read and write the tensors of a failed call, so the program must not. A call on
            device memory by pointer blocks in MPI, cannot be left and still ends the job. None:
            ``MPIDIST_ON_TIMEOUT``, else ``"abort"``. Children of the group inherit it.
        comm: An intracommunicator of mpi4py, whose ranks are the job as far as mpidist is
            concerned: groups, ``mpi://`` and RPC live among them, by their ranks in ``comm``, and
            the other ranks of MPI_COMM_WORLD run other programs. A duplicate is used; ``comm`` may
            be freed. With another communicator than before, this process leaves the ranks that it
            was among: its groups there must be closed, and RPC shut down. Every later call without
            ``comm`` means the same ranks. None: all ranks of MPI_COMM_WORLD, at first.

    Raises:
        LaunchError: The job was started in a way in which MPI cannot connect its ranks.
        TypeError: ``comm`` is no communicator of mpi4py (this rank).
        GroupError: Groups among other ranks than those of ``comm`` are open (all ranks of it).
        CommTimeout: Not all ranks called it in time.
        RankFailureError: A rank's program ended more than 2 s ago.
        DisagreementError: ``on_timeout`` differs between ranks (all ranks).
        ValueError: ``on_timeout`` is unknown, or ``comm`` is null, freed or an intercommunicator.
    """
    global _default
    if comm is not None and not _is_default_of(comm):
        runtime.enter_world(comm, creation_barrier.start_limit(seconds(timeout)))
    if _default is None or _default.is_closed:
        _default = from_world(name, timeout, debug=debug, on_timeout=on_timeout)
    return _default


def _is_default_of(comm: MPI.Comm) -> bool:
    """Return whether the group that ``init`` made is open, and has a communicator's ranks."""
    require_intracommunicator(comm)
    if _default is None or _default.is_closed:
        return False
    joined = runtime.world()
    places = creation_barrier.ranks_in(comm, joined.comm)
    return places == list(range(joined.size))


def _uses() -> list[str]:
    names = [f'group "{one.name}"' for one in group_state.open_groups() if not one.ends_with_world]
    return sorted(names)


def _drop() -> None:
    global _default, _worlds
    _default, _worlds = None, itertools.count(1)


def _abandon() -> None:
    for group in open_groups():
        group.close()


runtime.belongs_to_world(_drop, _uses, _abandon)


def from_world(
    name: str,
    timeout: float | timedelta | None,
    key: int | None = None,
    debug: bool | None = None,
    on_timeout: str | None = None,
) -> ProcessGroup:
    """Make a new group of all ranks of the job.

    Collective: over all ranks of the job.

    The arguments are those of ``init``; ``key`` orders the ranks, by their world rank if None.
    """
    limit = seconds(timeout)
    on_timeout = on_timeout or os.environ.get(ENV_ON_TIMEOUT) or ABORT
    creation_barrier.wait_for_world("init", creation_barrier.start_limit(limit))
    world = runtime.world()
    watchdog.start(world)  # before anything is made: it refuses wrong settings
    mpi = world.comm.Split(0, world.rank if key is None else key)
    places = tuple(creation_barrier.ranks_in(mpi, world.comm))
    number = next(_worlds)
    settings = GroupSettings(name, f"{world.key}/{number}", places, limit, debug, on_timeout)
    group = subgroups.create(ProcessGroup, mpi, settings)
    if tracing.file():
        importlib.import_module("mpidist.trace.timeline").begin_program()
    return group


def from_members(
    members: Sequence[int], name: str, timeout: float | timedelta | None
) -> ProcessGroup:
    """Make a group of some ranks of the job.

    Collective: over ``members``. The other ranks take no part, but must start MPI, as all ranks of
    a job must.

    Args:
        members: World ranks, in the new group's order.
        name, timeout: As of ``init``.

    Raises:
        CommTimeout: Not all members called it in time.
        RankFailureError: A member's program ended more than 2 s ago.
        DisagreementError: ``MPIDIST_ON_TIMEOUT`` differs between members (all members).
    """
    limit = seconds(timeout)
    mpi, key = creation_barrier.create_world_group(
        "init", members, creation_barrier.start_limit(limit)
    )
    on_timeout = os.environ.get(ENV_ON_TIMEOUT) or ABORT
    settings = GroupSettings(name, key, tuple(members), limit, None, on_timeout)
    return subgroups.create(ProcessGroup, mpi, settings)


def default() -> ProcessGroup:
    """Return the group that ``init`` made.

    Raises:
        GroupError: ``init`` was not called.
    """
    if _default is None or _default.is_closed:
        raise GroupError("no process group: call mpidist.comm.init() first, on all ranks")
    return _default


def native_group(process_group: AnyGroup) -> ProcessGroup:
    """Return the native group that ``process_group`` is or wraps.

    Args:
        process_group: A native group, a torch group on the backend ``mpidist``, or None: torch's
            default group if its backend is ours, else the group of all ranks of the job.

    Raises:
        TypeError: A group of another backend.
    """
    if process_group is None:
        process_group = default_group()
    if isinstance(process_group, ProcessGroup):
        return process_group
    native = getattr(process_group, "native", None)
    if isinstance(native, ProcessGroup):
        return native
    raise TypeError(
        "this needs a group of mpidist: mpidist.comm.init(), or a torch group made with "
        'backend="mpidist"; '
        f"got {type(process_group).__name__}"
    )


def default_group() -> Any:
    """Return torch's default group if its backend is ours, else the native group of all ranks."""
    import torch.distributed as dist

    # A script that has called torch's init_process_group("mpidist") means that group.
    if dist.is_available() and dist.is_initialized():
        default = dist.group.WORLD
        if isinstance(getattr(default, "native", None), ProcessGroup):
            return default
    return init()
