"""Barrier with a timeout whose error names the missing ranks.

Every rank sends its arrival to rank 0 and waits for a verdict. Rank 0 receives arrivals until all
ranks have arrived or the time is over, then sends the list of missing ranks to those that have
arrived: 2·(W - 1) messages, of 8 bytes and of a list of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.execution.work import seconds
from mpidist.comm.mpi import backoff, exited_ranks, rank_ranges
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.errors import CommTimeout

_SPIN_S = 500e-6
# The other ranks wait for the verdict longer than rank 0 for arrivals, by this time.
_GRACE_S = 2.0


class MonitoredBarrier:
    """The monitored barrier of one group.

    Attributes:
        number: Number of the last barrier.
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self.number = 0
        # One barrier of this rank at a time, because arrivals carry only the barrier's number.
        self._one_barrier = threading.Lock()

    def wait(self, timeout: float | timedelta | None) -> None:
        """Wait until all ranks have called it; see ``ProcessGroup.monitored_barrier``."""
        state = self._state
        state.require_usable("monitored_barrier")
        limit = state.timeout_s if timeout is None else seconds(timeout) or 0.0
        # Without the lock of the group's collectives. If this call held it, an asynchronous
        # collective of another rank would wait for this rank, and this call for that rank. The
        # messages have tags of their own.
        with self._one_barrier, state.explained("monitored_barrier"):
            self.number += 1
            if state.rank == 0:
                missing, have_ended = self._collect(limit)
            else:
                missing, have_ended = self._report_arrival(limit)
        if have_ended:
            raise exited_ranks.failure(
                state.where("monitored_barrier"), [state.world_ranks[rank] for rank in missing]
            )
        if missing:
            raise CommTimeout(
                f"{state.where('monitored_barrier')} number {self.number}: "
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
            return [peer for peer in range(1, self._state.size) if peer not in arrived]

        def have_arrived() -> bool:
            while (
                message := self._state.mpi.Improbe(
                    MPI.ANY_SOURCE, self._state.comm.own_tag(Tag.BARRIER_ARRIVAL), status
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
            return len(arrived) == self._state.size - 1

        self._wait(have_arrived, limit_s, absent)
        ended = self._ended(absent())
        missing = ended or absent()
        for peer, number in arrived.items():
            verdict = b"".join(
                word.to_bytes(8, "little") for word in (number, bool(ended), *missing)
            )
            self._state.mpi.Send(
                (verdict, len(verdict), MPI.BYTE),
                peer,
                self._state.comm.own_tag(Tag.BARRIER_VERDICT),
            )
        return missing, bool(ended)

    def _report_arrival(self, limit_s: float | None) -> tuple[list[int], bool]:
        self._send_arrival(self.number)
        words: list[int] = []
        status = MPI.Status()

        def has_verdict() -> bool:
            while (
                message := self._state.mpi.Improbe(
                    0, self._state.comm.own_tag(Tag.BARRIER_VERDICT), status
                )
            ) is not None:
                data = bytearray(status.Get_count(MPI.BYTE))
                message.Recv((data, len(data), MPI.BYTE))
                words[:] = [
                    int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)
                ]
                # Another number is the verdict of a barrier that this rank has withdrawn from.
                if words[0] == self.number:
                    return True
            return False

        # The end of any rank counts, because rank 0 may have ended its wait before this rank
        # arrived.
        others = [rank for rank in range(self._state.size) if rank != self._state.rank]
        if self._wait(has_verdict, None if limit_s is None else limit_s + _GRACE_S, lambda: others):
            return words[2:], bool(words[1])
        self._send_arrival(-self.number)
        ended = self._ended(others)
        return ended or [0], bool(ended)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        gone = exited_ranks.ended([self._state.world_ranks[rank] for rank in ranks])
        return [rank for rank in ranks if self._state.world_ranks[rank] in gone]

    def _send_arrival(self, number: int) -> None:
        word = number.to_bytes(8, "little", signed=True)
        self._state.mpi.Send((word, 8, MPI.BYTE), 0, self._state.comm.own_tag(Tag.BARRIER_ARRIVAL))

    def _wait(
        self, ready: Callable[[], bool], limit_s: float | None, needed: Callable[[], list[int]]
    ) -> bool:
        """Wait until ``ready``; return False if the time is over or a needed rank has ended."""

        def check() -> None:
            self._state.raise_failure()
            if self._ended(needed()):
                raise _RankEnded

        try:
            return backoff.until(ready, check, limit_s, _SPIN_S, _SPIN_S)
        except _RankEnded:
            return ready()


class _RankEnded(Exception):
    """A rank that the barrier needs has ended."""
