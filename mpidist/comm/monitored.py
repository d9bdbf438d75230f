"""A barrier that says who is missing, instead of hanging.

Every rank reports to rank 0 and waits for its verdict: 2·(W - 1) messages of 8 bytes and a list of ranks. Rank 0 collects until
all are there or the time is over, then tells those that came who did not.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from mpidist.comm.execution import Execution
from mpidist.comm.library import MPI
from mpidist.comm.work import seconds
from mpidist.errors import CommTimeout

_ARRIVE, _VERDICT = 4, 5  # the library's own tags
_PAUSE_S = 50e-6
_SPIN_S = 500e-6
_GRACE_S = 2.0  # how much longer than rank 0 the others wait for its verdict


class MonitoredBarrier(Execution):
    """The monitored barrier of a process group."""

    _barriers = 0

    def monitored_barrier(self, timeout: float | timedelta | None = None, wait_all_ranks: bool = True) -> None:
        """Wait until all ranks have called it, at most ``timeout`` (the group's by default).

        Collective: over the group.

        Args:
            timeout: Seconds or a timedelta.
            wait_all_ranks: Accepted for torch's signature. The whole list of missing ranks is always collected.

        Raises:
            CommTimeout: On every rank that came, naming the ranks that did not; if rank 0 is missing, naming rank 0.
        """
        self._require_usable("monitored_barrier")
        limit = seconds(timeout) or self.timeout_s
        self._barriers += 1
        with self._door:
            try:
                if self.rank == 0:
                    missing = self._collect(limit)
                else:
                    missing = self._report_arrival(limit)
            except Exception as error:
                raise self._explain(error, "monitored_barrier") from error
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise CommTimeout(
                f"{self.where('monitored_barrier')} number {self._barriers}: rank{plural} {', '.join(map(str, missing))} "
                f"did not come within {limit:g} s"
            )

    def _collect(self, limit_s: float | None) -> list[int]:
        arrived: dict[int, int] = {}  # peer: the number of its barrier
        status = MPI.Status()

        def all_there() -> bool:
            while (message := self._mpi.Improbe(MPI.ANY_SOURCE, self._comm.own_tag(_ARRIVE), status)) is not None:
                word, peer = bytearray(8), status.Get_source()
                message.Recv((word, 8, MPI.BYTE))
                number = int.from_bytes(word, "little", signed=True)
                # A rank that gave up says so, in the order of its messages: its arrival counts no more.
                if number > 0:
                    arrived[peer] = number
                else:
                    arrived.pop(peer, None)
            return len(arrived) == self.size - 1

        _poll(all_there, limit_s)
        missing = [peer for peer in range(1, self.size) if peer not in arrived]
        for peer, number in arrived.items():
            verdict = b"".join(word.to_bytes(8, "little") for word in (number, *missing))
            self._mpi.Send((verdict, len(verdict), MPI.BYTE), peer, self._comm.own_tag(_VERDICT))
        return missing

    def _report_arrival(self, limit_s: float | None) -> list[int]:
        self._tell_root(self._barriers)
        words: list[int] = []
        status = MPI.Status()

        def verdict_there() -> bool:
            while (message := self._mpi.Improbe(0, self._comm.own_tag(_VERDICT), status)) is not None:
                data = bytearray(status.Get_count(MPI.BYTE))
                message.Recv((data, len(data), MPI.BYTE))
                words[:] = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
                if words[0] == self._barriers:  # else it is about a barrier that this rank gave up
                    return True
            return False

        if _poll(verdict_there, None if limit_s is None else limit_s + _GRACE_S):
            return words[1:]
        self._tell_root(-self._barriers)
        return [0]

    def _tell_root(self, number: int) -> None:
        word = number.to_bytes(8, "little", signed=True)
        self._mpi.Send((word, 8, MPI.BYTE), 0, self._comm.own_tag(_ARRIVE))


def _poll(ready: Any, limit_s: float | None) -> bool:
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if limit_s is not None and waited > limit_s:
            return False
        if waited > _SPIN_S:
            time.sleep(_PAUSE_S)
    return True
