"""A barrier that says who is missing, instead of hanging.

Every rank reports to rank 0 and waits for its verdict: 2·(W - 1) messages of 8 bytes and a list of
ranks. Rank 0 collects until all are there or the time is over, then tells those that came who did
not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.autograd import profiler as torch_profiler

from mpidist.comm import profiling
from mpidist.comm.execution import Execution
from mpidist.comm.mpi import exited_ranks
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.work import seconds
from mpidist.errors import CommTimeout

_PAUSE_S = 50e-6
_SPIN_S = 500e-6
_GRACE_S = 2.0  # how much longer than rank 0 the others wait for its verdict


class MonitoredBarrier(Execution):
    """The monitored barrier of a process group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._barriers = 0
        # Threads of this rank take turns: the others know a barrier by its number alone.
        self._one_barrier = threading.Lock()

    def monitored_barrier(
        self, timeout: float | timedelta | None = None, wait_all_ranks: bool = True
    ) -> None:
        """Wait until all ranks have called it, at most ``timeout`` (the group's by default).

        Collective: over the group.

        Args:
            timeout: Seconds or a timedelta. 0 does not wait: rank 0 looks once who has come, as
                torch's does on Gloo.
            wait_all_ranks: Accepted for torch's signature. The whole list of missing ranks is
                always collected.

        Raises:
            CommTimeout: On every rank that came, naming the ranks that did not; if rank 0 is
                missing, naming rank 0.
            RankFailureError: On every rank that came, instead: a rank came to the end of its
                program more than 2 s ago.
        """
        meet = self._meet
        if torch_profiler._is_profiler_enabled:
            meet = profiling.calling(meet, self, "monitored_barrier")
        meet(timeout)

    def _meet(self, timeout: float | timedelta | None) -> None:
        self._require_usable("monitored_barrier")
        limit = self.timeout_s if timeout is None else seconds(timeout) or 0.0
        # Not the door of the group's order: an asynchronous collective that the group's thread is
        # in on another rank, and that waits for the door here, would wait for this call, and this
        # call for that rank. These messages have tags of their own.
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
            plural = "s" if len(missing) > 1 else ""
            raise CommTimeout(
                f"{self.where('monitored_barrier')} number {self._barriers}: rank{plural} "
                f"{', '.join(map(str, missing))} "
                f"did not come within {limit:g} s"
            )

    def _collect(self, limit_s: float | None) -> tuple[list[int], bool]:
        """Wait for the others on rank 0 and give them the verdict: the ranks that are missing, and whether they have ended."""
        arrived: dict[int, int] = {}  # peer: the number of its barrier
        status = MPI.Status()

        def absent() -> list[int]:
            return [peer for peer in range(1, self.size) if peer not in arrived]

        def all_there() -> bool:
            while (
                message := self._mpi.Improbe(
                    MPI.ANY_SOURCE, self._comm.own_tag(Tag.BARRIER_ARRIVAL), status
                )
            ) is not None:
                word, peer = bytearray(8), status.Get_source()
                message.Recv((word, 8, MPI.BYTE))
                number = int.from_bytes(word, "little", signed=True)
                # A rank that gave up says so, in the order of its messages: its arrival counts no
                # more.
                if number > 0:
                    arrived[peer] = number
                else:
                    arrived.pop(peer, None)
            return len(arrived) == self.size - 1

        self._poll(all_there, limit_s, absent)
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
        self._tell_root(self._barriers)
        words: list[int] = []
        status = MPI.Status()

        def verdict_there() -> bool:
            while (
                message := self._mpi.Improbe(0, self._comm.own_tag(Tag.BARRIER_VERDICT), status)
            ) is not None:
                data = bytearray(status.Get_count(MPI.BYTE))
                message.Recv((data, len(data), MPI.BYTE))
                words[:] = [
                    int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)
                ]
                if words[0] == self._barriers:  # else it is about a barrier that this rank gave up
                    return True
            return False

        # Any rank's end concerns this one: rank 0 may have given the barrier up for it before this
        # rank came.
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self._poll(
            verdict_there, None if limit_s is None else limit_s + _GRACE_S, lambda: others
        ):
            return words[2:], bool(words[1])
        self._tell_root(-self._barriers)
        ended = self._ended(others)
        return ended or [0], bool(ended)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        gone = exited_ranks.ended([self.world_ranks[rank] for rank in ranks])
        return [rank for rank in ranks if self.world_ranks[rank] in gone]

    def _tell_root(self, number: int) -> None:
        word = number.to_bytes(8, "little", signed=True)
        self._mpi.Send((word, 8, MPI.BYTE), 0, self._comm.own_tag(Tag.BARRIER_ARRIVAL))

    def _poll(
        self, ready: Callable[[], bool], limit_s: float | None, needed: Callable[[], list[int]]
    ) -> bool:
        """Wait until ``ready``; False when the time is over or one of the ranks that it needs has ended."""
        start = time.monotonic()
        while not ready():
            waited = time.monotonic() - start
            if limit_s is not None and waited >= limit_s:
                return False
            if waited > _SPIN_S:
                self._raise_failure()
                if self._ended(needed()):
                    return ready()
                time.sleep(_PAUSE_S)
        return True
