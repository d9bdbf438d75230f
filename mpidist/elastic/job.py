"""``run``: a training that goes on when ranks die.

Each process of the job is a rank or a spare, which waits for the death of a rank. On an MPI with
ULFM (Open MPI 5 by ``mpirun --with-ft ulfm``) a death ends ``train()`` on the other ranks by an
error, which never leaves ``run``; a spare takes the number of the dead rank, and ``train()`` begins
again on all of them, in processes that live on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.library import has_ulfm
from mpidist.comm.mpi.processes import Processes, all_processes
from mpidist.elastic.recovery import Recovery
from mpidist.elastic.roles import VARIABLE, Limits, number_of_spares
from mpidist.elastic.warm_up import warm_up
from mpidist.errors import DisagreementError, GroupError, LaunchError, MpidistError

T = TypeVar("T")

_START_S = 300.0  # longest wait for the other processes at the start, which imports may delay
_NONE = -1

# Of this process, for later calls: the dead stay dead, and a spare that was needed is a rank.
_recovery: Recovery[Any] | None = None
_is_running = False


def run(
    train: Callable[[], T],
    warm: Callable[[], object] | None = None,
    *,
    min_ranks: int | None = None,
    max_failures: int | None = None,
    timeout_s: float = 60.0,
) -> T | None:
    """Train on the ranks of the job, and go on when some of them die.

    ``train()`` makes all groups, meshes, modules and optimizers itself, among the ranks that
    ``mpidist.comm.init()`` or ``init_process_group("mpidist")`` gives it, loads the newest state
    (``mpidist.checkpoint.load``), and commits new ones (``mpidist.checkpoint.commit``). After a
    death its calls raise, RPC ends, groups are closed, and it is called again on all ranks. What
    the process has beside that lives on: imported modules, the CUDA context, compiled functions,
    data. An error that is not the death's leaves ``run`` and ends the job.

    The last ``MPIDIST_SPARES`` processes of the job are spares: they call ``warm()``, and sleep. As
    long as there are some, the number of ranks stays; then it falls. Where a death leaves fewer
    than ``min_ranks``, or is one more than ``max_failures``, all processes end with status 75.
    Without a death in the last world, or without one at all, the job's status is the program's.

    What Python's garbage collector knows when it is called, it leaves alone until it returns.

    Without ULFM, or a switched-off one, ``train()`` is called once, and a death ends the job.

    A later call goes on with the processes that live: the dead are not replaced, and a spare that
    was needed stays a rank.

    Collective: over all processes of the job, in which no group is open, with the same arguments.

    Args:
        train: Called without arguments, and again after each death.
        warm: Called on a spare before it sleeps: what would delay its first step. If None, imports
            what torch imports at its first step, and takes a step on a small model.
        min_ranks: Least number of ranks to go on with; None for 1.
        max_failures: Most deaths, of ranks and spares; None for no limit.
        timeout_s: Longest time from a death's error to the next ``train()``. A rank that does not
            come within it is stuck, and the job ends.

    Returns:
        What ``train`` has returned, on all ranks of the last world; None on a spare that was not
        needed.

    Raises:
        TypeError, ValueError: A wrong argument (this process).
        GroupError: A group is open, or RPC runs (all processes); it is called within ``train``.
        LaunchError: There are spares without ULFM, or more than ranks; ``MPIDIST_SPARES`` is no
            number (all processes).
        DisagreementError: The arguments or ``MPIDIST_SPARES`` differ (all processes).
        CommTimeout: Not all processes called it within five minutes of each other.
        SystemExit: The job cannot go on, with status 75; or ``train`` has raised it, on a spare
            with the status of a rank that has.
    """
    if not callable(train) or not (warm is None or callable(warm)):
        raise TypeError(f"run needs functions as train and warm; got {train!r} and {warm!r}")
    _require_count("min_ranks", min_ranks, 1)
    _require_count("max_failures", max_failures, 0)
    if not timeout_s > 0:
        raise ValueError(f"run needs a timeout_s above 0; got {timeout_s}")
    global _is_running
    if _is_running:
        raise GroupError(
            "run was called within a train of run, in which the spares take no part: call the "
            "inner train itself"
        )
    _is_running = True
    try:
        return _run(train, warm or warm_up, Limits(min_ranks or 1, max_failures), timeout_s)
    finally:
        _is_running = False


def _run(
    train: Callable[[], T], warm: Callable[[], object], limits: Limits, timeout_s: float
) -> T | None:
    global _recovery
    processes = all_processes(_START_S) if _recovery is None else _recovery.processes
    try:
        count = _agreed_spares(processes, limits)
        if has_ulfm() and _recovery is None:
            _require_ranks(processes, count)
    except MpidistError as error:
        runtime.note_error_of_all(error)
        raise
    runtime.leave_world()
    if not has_ulfm():
        processes.free()
        return train()
    if _recovery is None:
        _recovery = Recovery(processes, count)
    found: T | None = _recovery.run(train, warm, limits, timeout_s)
    return found


def _require_count(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"run needs a whole number as {name}; got {value!r}")
    if value < least:
        raise ValueError(f"run needs a {name} of at least {least}; got {value}")


def _agreed_spares(processes: Processes, limits: Limits) -> int:
    """Return the number of spares. Collective.

    Raises:
        GroupError, LaunchError, DisagreementError: See ``run`` (all processes).
    """
    uses, unreadable, count = runtime.uses_of_world(), "", _NONE
    try:
        count = number_of_spares(os.environ)
    except LaunchError as error:
        unreadable = str(error)
    most = _NONE if limits.max_failures is None else limits.max_failures
    numbers = [count, limits.min_ranks, most]
    rows = processes.gather([bool(uses), *numbers])
    where = f"process {processes.rank} of {processes.size}: run"
    if any(row[0] for row in rows):
        named = f" ({'; '.join(uses)})" if uses else ""
        raise GroupError(
            f"{where} was called while groups of its job are open{named}; close them first, and "
            "make groups within train"
        )
    if any(row[1] == _NONE for row in rows):
        raise LaunchError(f"{where}: {unreadable or f'{VARIABLE} is no number elsewhere'}")
    if any(row[1:] != rows[0][1:] for row in rows):
        names = (VARIABLE, "min_ranks", "max_failures")
        differing = [
            name for place, name in enumerate(names, 1) if len({row[place] for row in rows}) > 1
        ]
        raise DisagreementError(
            f"{where} needs the same {' and '.join(differing)} on all processes"
        )
    if count and not has_ulfm():
        raise LaunchError(
            f"{where}: {count} spares take no rank's place without ULFM, by which a job survives a "
            "dead rank; start it with mpidist run --ft, or mpirun --with-ft ulfm (Open MPI 5), or "
            f"without {VARIABLE}"
        )
    return count


def _require_ranks(processes: Processes, spares: int) -> None:
    ranks = processes.size - spares
    if spares > ranks:
        raise LaunchError(
            f"process {processes.rank} of {processes.size}: run: {spares} spares leave "
            f"{max(ranks, 0)} ranks; there are to be at most as many spares as ranks"
        )
