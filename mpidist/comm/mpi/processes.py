"""The living processes of a job, on a communicator that shrinks after deaths (ULFM).

They are more than the world: a spare is one of them, and takes no part in the world's groups. The
communicator serves the recovery after a death alone, so nothing that the program calls waits on it.

Source: Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication
capability: design and rationale", 2013 (revoke, shrink, agree).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.comm.mpi import (
    agreement_lock,
    backoff,
    mpi_errors,
    nonblocking,
    revocation,
    runtime,
)
from mpidist.comm.mpi.library import MPI
from mpidist.errors import CommTimeout, RankFailureError

_START_SLEEP_S = 1e-3
# Bits of the flag that an agreement combines by "and": whether a process is done, and the
# complement of the status with which it wants the job to end, under a bit that says so.
_DONE = 1
_ENDS = 1 << 8
_STATUS = _ENDS - 1


class Agreement(NamedTuple):
    """Result of an agreement of the living processes, the same on all of them.

    Attributes:
        is_done: All are done, and none has died.
        status: With which some of them want the job to end; None if none does.
    """

    is_done: bool
    status: int | None = None


class Processes:
    """Processes of the job, all that live at one time.

    Args:
        comm: Their communicator, for this object alone.

    Attributes:
        rank: This process among them.
        size: Their number.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def free(self) -> None:
        """Free the communicator: nothing is called on this object any more. Collective."""
        self._comm.Free()

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return each process's row of whole numbers, by rank. Collective."""
        mine = np.array(row, np.int64)
        rows = np.empty((self.size, len(mine)), np.int64)
        self._comm.Allgather(mine, rows)
        found: list[list[int]] = rows.tolist()
        return found

    def split(self, number: int | None) -> MPI.Comm | None:
        """Return a communicator of the processes that give a number, by these numbers.

        Collective. None without a number.
        """
        color = MPI.UNDEFINED if number is None else 0
        made = self._comm.Split(color, number or 0)
        return None if made == MPI.COMM_NULL else made

    def agree(
        self,
        is_done: bool,
        sleep_s: float,
        status: int | None = None,
        timeout_s: float | None = None,
    ) -> Agreement | None:
        """Return whether all are done, and how the job is to end; the same on all that live.

        Collective: also for processes that have left another call because of an error.

        Blocks: until all living processes have called it; sleeps between tests.

        Args:
            is_done: This process.
            sleep_s: Longest time between two tests.
            status: From 0 to 255, with which this process wants the job to end; None if it does
                not.
            timeout_s: Longest wait; None for no limit.

        Returns:
            None if the time was over first: the others may still agree with this process.
        """
        word = 0 if status is None else _ENDS | status
        flag = np.array([~(word << 1) & ~_DONE | is_done], np.int32)
        try:
            with agreement_lock.lock:
                request = self._comm.Iagree(flag)
            if not backoff.until(
                lambda: _is_complete(request), timeout_s=timeout_s, longest_s=sleep_s
            ):
                nonblocking.keep([(request, flag)])
                return None
        except MPI.Exception as error:
            if not mpi_errors.is_failure(error):
                raise
            return Agreement(False)
        word = ~int(flag[0]) >> 1
        return Agreement(bool(flag[0] & _DONE), word & _STATUS if word & _ENDS else None)

    def is_of_death(self, error: Exception, wait_s: float) -> bool:
        """Return whether an error may come of a death: it says so, or one of them has died.

        Args:
            error: Of any call.
            wait_s: How long to wait for the news of a death.
        """
        if isinstance(error, RankFailureError):
            return True
        if mpi_errors.is_mpi_error(error) and mpi_errors.is_failure(error):
            return True
        return backoff.until(self._has_death, timeout_s=wait_s, sleep_s=_START_SLEEP_S)

    def _has_death(self) -> bool:
        return bool(mpi_errors.known_dead(self._comm, range(self.size)))

    def interrupt(self) -> None:
        """End the waits of all other processes in ``gather`` and ``split``; ``agree`` goes on."""
        revocation.revoke(self._comm)

    def shrunk(self) -> Processes:
        """Return those that live. Collective: over them."""
        with agreement_lock.lock:
            return Processes(self._comm.Shrink())


def _is_complete(request: MPI.Request) -> bool:
    with agreement_lock.lock:
        return request.Test()


def all_processes(timeout_s: float | None) -> Processes:
    """Return all processes of the job; starts MPI.

    Collective: over them.

    Raises:
        CommTimeout: Not all have called it in time.
    """
    comm, request = runtime.processes_of_job().Idup()
    if not backoff.until(request.Test, timeout_s=timeout_s, sleep_s=_START_SLEEP_S):
        raise CommTimeout(
            f"process {comm.Get_rank()} of {comm.Get_size()}: not all processes of the job came "
            f"within {timeout_s:g} s"
        )
    return Processes(comm)
