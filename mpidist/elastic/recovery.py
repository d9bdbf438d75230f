"""Recovery of a job from the deaths of its ranks, on one process.

The life of a job is a series of worlds. Each begins with the roles of the processes that live
(``roles``), and ends when all of them agree whether it has ended well; a death makes that agreement
fail on all of them alike. Then they shrink to those that live, leave the world and begin the next
one. A death at any point of this is a death in the world that begins.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

from mpidist.comm.mpi import rank_ranges, runtime
from mpidist.comm.mpi.processes import Processes
from mpidist.comm.watchdog import watchdog
from mpidist.elastic import roles
from mpidist.elastic.neighbours import Neighbours
from mpidist.elastic.roles import DEAD, SPARE, Limits, Plan
from mpidist.elastic.warm_up import import_late_modules
from mpidist.errors import RankFailureError

T = TypeVar("T")

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: a scheduler should start the job again
_NEWS_S = 1.0  # an error may be there before the news of the death that has caused it
# Longest sleeps between two looks whether the others have ended.
_SPARE_SLEEP_S = 20e-3
_RANK_SLEEP_S = 1e-3
_EXIT_S = 5.0  # longest wait of a rank that exits for the others
_DEATH = "a rank of this job has died"


class Recovery(Generic[T]):
    """A process's part in a job that outlives its ranks.

    Collective: over the processes.

    Args:
        processes: All processes of the job.
        spares: Number of spares, the last of these processes.

    Attributes:
        processes: Those that live.
    """

    def __init__(self, processes: Processes, spares: int) -> None:
        self.processes = processes
        self._me = processes.rank  # this process's number in ``_roles``
        self._roles = roles.at_start(processes.size, spares)
        self._neighbours = Neighbours(processes)
        self._limits = Limits()
        self._is_warm = False
        # World of which ``_roles`` are, and of which this rank has ended its training.
        self._world = 0
        self._is_done = False
        self._result: T | None = None
        # Of this rank in the world that has ended; the second is its traceback.
        self._error: tuple[Exception, str] | None = None
        self._exit: SystemExit | None = None
        self._deadline = Deadline()

    @property
    def _is_spare(self) -> bool:
        return self._roles[self._me] == SPARE

    def _has_lost(self) -> bool:
        return self.processes.size < len(self._roles)

    def run(
        self,
        train: Callable[[], T],
        warm: Callable[[], object],
        limits: Limits,
        timeout_s: float,
    ) -> T | None:
        """Train until all ranks have ended well; return the result, None on a spare.

        Collective: over the living processes.

        Args:
            train, warm: See ``elastic.run``.
            limits: Of the job.
            timeout_s: Longest recovery.

        Raises:
            SystemExit: The job cannot go on (all living processes), or ``train`` has raised it.
            Exception: Of ``train``, if no rank has died.
        """
        self._limits, self._deadline.timeout_s = limits, timeout_s
        self._is_done, self._result, self._exit = False, None, None
        if self._is_spare and not self._is_warm:
            warm()
            self._is_warm = True
        # What lives on (modules, data) is left out of the collection in a recovery, which takes a
        # second with all of torch. What the program has left out stays so.
        import_late_modules()
        is_frozen = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        try:
            return self._until_all_have_ended(train)
        finally:
            if not is_frozen:
                gc.unfreeze()

    def _until_all_have_ended(self, train: Callable[[], T]) -> T | None:
        while True:
            has_ended_well = self._work(train)
            sleep_s = _SPARE_SLEEP_S if self._is_spare else _RANK_SLEEP_S
            status, timeout_s = None, None
            if self._exit is not None:
                status, timeout_s = _status_of(self._exit), _EXIT_S
            agreed = self.processes.agree(has_ended_well, sleep_s, status, timeout_s)
            if agreed is None or agreed.is_done or agreed.status is not None:
                return self._end(status if agreed is None else agreed.status)
            self._deadline.start()
            former, self.processes = self.processes, self.processes.shrunk()
            if self._error is not None and self.processes.size == former.size:
                # The program has raised it, and no rank has died.
                runtime.write_stderr(self._error[1])
                raise self._error[0]

    def _end(self, status: int | None) -> T | None:
        """Leave the job's last world; return the result.

        Args:
            status: With which a rank exits; None for the end of the training.

        Raises:
            SystemExit: ``train`` has raised it, here or, on a spare, on a rank.
            Exception: Of a rank that waits for one that has exited.
        """
        self._deadline.stop()
        if runtime.is_initialized():
            # A rank whose program ends before this one's is not lost.
            watchdog.interrupt_at_death(False)
        if self._has_lost():
            runtime.note_recovery(status or 0)
        if self._exit is not None:
            raise self._exit
        if self._error is not None:
            runtime.write_stderr(self._error[1])
            raise self._error[0]
        if self._is_spare and status:
            sys.exit(status)
        return self._result

    def _work(self, train: Callable[[], T]) -> bool:
        """Take part in one world; return False if it ends by a death."""
        try:
            trains = self._enters_world()
            # A spare that is left waits for as long as the others train.
            self._deadline.stop()
            if trains:
                try:
                    self._result = train()
                except SystemExit as error:
                    self._exit = error
                self._is_done = True
                if runtime.is_initialized():
                    runtime.settle_world(None if self._exit is None else _EXIT_S)
        except Exception as error:
            if not self.processes.is_of_death(error, _NEWS_S):
                raise
            self._deadline.start()
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._error = _without_frames(error), text
            self.processes.interrupt()
        else:
            return True
        self._leave_before_agreement(_failure(self._error[0]))
        return False

    def _leave_before_agreement(self, failure: RankFailureError) -> None:
        """Leave the world here: in the agreement no other thread is to call MPI."""
        try:
            if runtime.is_initialized():
                _leave_world(failure)
        except Exception as error:
            # Of another death; the world is left before the next one is entered.
            if not self.processes.is_of_death(error, _NEWS_S):
                raise

    def _enters_world(self) -> bool:
        """Begin the next world; return whether this process trains in it.

        Collective: over the living processes.
        """
        rows = self.processes.gather([self._me, self._world, self._is_done, *self._roles])
        # A process that another death has kept from beginning a world has older roles.
        newest = max(world for _, world, *_ in rows)
        former = next(row for _, world, _, *row in rows if world == newest)
        plan = roles.plan(former, {process for process, *_ in rows}, self._limits)
        self._neighbours.end(process for process, role in enumerate(plan.roles) if role == DEAD)
        if not plan.lost and all(
            former[process] == SPARE or (world == newest and is_done)
            for process, world, is_done, *_ in rows
        ):
            return False
        if plan.refusal:
            self._give_up(plan.refusal)
        if runtime.is_initialized():
            _leave_world(RankFailureError(_DEATH))
        self._roles, self._world, self._is_done = plan.roles, newest + 1, False
        self._error = self._exit = None
        comm = self.processes.split(None if self._is_spare else self._roles[self._me])
        if comm is None:
            return False
        runtime.enter_world(comm, self._deadline.timeout_s)
        comm.Free()
        watchdog.interrupt_at_death(True)
        if plan.lost and self._roles[self._me] == 0:
            self._tell(plan)
        return True

    def _tell(self, plan: Plan) -> None:
        dead = rank_ranges.named(plan.lost)
        runtime.write_stderr(
            f"[rank 0] mpidist goes on after the death of {dead}: {plan.described()}; "
            f"{plan.spares} spare{'' if plan.spares == 1 else 's'} left\n"
        )

    def _give_up(self, reason: str) -> None:
        """End this process; the others do the same."""
        runtime.write_stderr(
            f"[process {self._me}] mpidist ends the job with status {EXIT_CODE}: {reason}\n"
        )
        if runtime.is_initialized():
            _leave_world(RankFailureError(_DEATH))
        self._deadline.stop()
        runtime.note_recovery(EXIT_CODE)
        sys.exit(EXIT_CODE)


class Deadline:
    """Time limit of a recovery: ends the job if a rank does not come.

    Attributes:
        timeout_s: From ``start`` to ``stop``.
    """

    def __init__(self) -> None:
        self.timeout_s = 60.0
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._timer is None:
            self._timer = threading.Timer(self.timeout_s, self._end_job)
            self._timer.daemon = True
            self._timer.name = "mpidist-deadline"
            self._timer.start()

    def stop(self) -> None:
        """End the limit, if it has begun."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_job(self) -> None:
        runtime.abort(
            f"the recovery from a death did not end within {self.timeout_s:g} s: another rank is "
            "stuck (timeout_s of mpidist.elastic.run)"
        )


def _status_of(error: SystemExit) -> int:
    """Return the status of a process that ends by it."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _without_frames(error: Exception) -> Exception:
    """Take the frames, which hold the model, from an error and those that have led to it."""
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return error


def _failure(error: Exception) -> RankFailureError:
    """Return the error that the calls of other threads raise."""
    if isinstance(error, RankFailureError):
        return RankFailureError(str(error), error.ranks)
    return RankFailureError(f"{_DEATH}: {error}")


def _leave_world(failure: RankFailureError) -> None:
    """Leave the world whose ranks have died, with all that the training has made in it.

    Args:
        failure: What the calls of other threads raise.
    """
    watchdog.interrupt(failure)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    runtime.abandon_world()
    # Models refer to their hooks, and these to them: their memory is needed for the next ones.
    gc.collect()
