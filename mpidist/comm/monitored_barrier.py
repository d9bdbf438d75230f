"""Barrier with a timeout whose error names the missing ranks.

Every rank sends its arrival to rank 0 and waits for a verdict. Rank 0 receives arrivals until all
ranks have arrived or the time is over, then sends the list of missing ranks to those that have
arrived: 2·(W - 1) messages, of 8 bytes and of a list of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.autograd import profiler as torch_profiler

from mpidist.comm.execution import profiling
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.group_settings import GroupSettings
from mpidist.comm.execution.work import seconds
from mpidist.comm.mpi import backoff, exited_ranks, rank_ranges
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.errors import CommTimeout

_SPIN_S = 500e-6
# The other ranks wait for the verdict longer than rank 0 for arrivals, by this time.
_GRACE_S = 2.0


class MonitoredBarrier(Execution):
    """The monitored barrier of a process group."""

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        self._barriers = 0
        # One barrier of this rank at a time, because arrivals carry only the barrier's number.
        self._one_barrier = threading.Lock()

    def monitored_barrier(
        self, timeout: float | timedelta | None = None, wait_all_ranks: bool = True
    ) -> None:
        """Wait until all ranks have called it, at most ``timeout`` (the group's by default).

        Collective: over the group.

        Args:
            timeout: Seconds or a timedelta. With 0, rank 0 probes once for arrivals, as torch's
                barrier on Gloo.
            wait_all_ranks: Accepted for torch's signature. The error always names all missing
                ranks.

        Raises:
            CommTimeout: On every rank that has arrived, naming the missing ranks; if rank 0 is
                missing, naming rank 0.
            RankFailureError: On every rank that has arrived, if a rank's program ended more
                than 2 s ago.
        """
        execute = self._monitored_barrier
        if torch_profiler._is_profiler_enabled:
            execute = profiling.calling(execute, self, "monitored_barrier")
        execute(timeout)

    def _monitored_barrier(self, timeout: float | timedelta | None) -> None:
        self._require_usable("monitored_barrier")
        limit = self.timeout_s if timeout is None else seconds(timeout) or 0.0
        # Without the lock of the group's collectives. If this call held it, an asynchronous
        # collective of another rank would wait for this rank, and this call for that rank. The
        # messages have tags of their own.
        with self._one_barrier, self._explained("monitored_barrier"):
            self._barriers += 1
            if self.rank == 0:
                missing, have_ended = self._collect(limit)
            else:
                missing, have_ended = self._report_arrival(limit)
        if have_ended:
            raise exited_ranks.failure(
                self.where("monitored_barrier"), [self.world_ranks[rank] for rank in missing]
            )
        if missing:
            raise CommTimeout(
                f"{self.where('monitored_barrier')} number {self._barriers}: "
                f"{rank_ranges.named(missing)} did not come within {limit:g} s"
            )

    def _collect(self, limit_s: float | None) -> tuple[list[int], bool]:
        """Wait for the arrivals on rank 0 and send the verdict.

        Returns:
            The missing ranks, and whether they have ended.
        """
        arrived: dict[int, int] = {}  # peer: the number of its barrier
        status = MPI.Status()

        def absent() -> list[int]:
            return [peer for peer in range(1, self.size) if peer not in arrived]

        def have_arrived() -> bool:
            while (
                message := self._mpi.Improbe(
                    MPI.ANY_SOURCE, self._comm.own_tag(Tag.BARRIER_ARRIVAL), status
                )
            ) is not None:
                word, peer = bytearray(8), status.Get_source()
                message.Recv((word, 8, MPI.BYTE))
                number = int.from_bytes(word, "little", signed=True)
                # A negative number withdraws the arrival of a rank whose time is over.
                if number > 0:
                    arrived[peer] = number
                else:
                    arrived.pop(peer, None)
            return len(arrived) == self.size - 1

        self._wait(have_arrived, limit_s, absent)
        ended = self._ended(absent())
        missing = ended or absent()
        for peer, number in arrived.items():
            verdict = b"".join(
                word.to_bytes(8, "little") for word in (number, bool(ended), *missing)
            )
            self._mpi.Send(
                (verdict, len(verdict), MPI.BYTE), peer, self._comm.own_tag(Tag.BARRIER_VERDICT)
            )
        return missing, bool(ended)

    def _report_arrival(self, limit_s: float | None) -> tuple[list[int], bool]:
        self._send_arrival(self._barriers)
        words: list[int] = []
        status = MPI.Status()

        def has_verdict() -> bool:
            while (
                message := self._mpi.Improbe(0, self._comm.own_tag(Tag.BARRIER_VERDICT), status)
            ) is not None:
                data = bytearray(status.Get_count(MPI.BYTE))
                message.Recv((data, len(data), MPI.BYTE))
                words[:] = [
                    int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)
                ]
                # Another number is the verdict of a barrier that this rank has withdrawn from.
                if words[0] == self._barriers:
                    return True
            return False

        # The end of any rank counts, because rank 0 may have ended its wait before this rank
        # arrived.
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self._wait(has_verdict, None if limit_s is None else limit_s + _GRACE_S, lambda: others):
            return words[2:], bool(words[1])
        self._send_arrival(-self._barriers)
        ended = self._ended(others)
        return ended or [0], bool(ended)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        gone = exited_ranks.ended([self.world_ranks[rank] for rank in ranks])
        return [rank for rank in ranks if self.world_ranks[rank] in gone]

    def _send_arrival(self, number: int) -> None:
        word = number.to_bytes(8, "little", signed=True)
        self._mpi.Send((word, 8, MPI.BYTE), 0, self._comm.own_tag(Tag.BARRIER_ARRIVAL))

    def _wait(
        self, ready: Callable[[], bool], limit_s: float | None, needed: Callable[[], list[int]]
    ) -> bool:
        """Wait until ``ready``; return False if the time is over or a needed rank has ended."""

        def check() -> None:
            self._raise_failure()
            if self._ended(needed()):
                raise _RankEnded

        try:
            return backoff.until(ready, check, limit_s, _SPIN_S, _SPIN_S)
        except _RankEnded:
            return ready()


class _RankEnded(Exception):
    """A rank that the barrier needs has ended."""
