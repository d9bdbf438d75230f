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
        space = {peer: bytearray(8) for peer in range(1, self.size)}
        requests = {peer: self._listen(peer, space[peer]) for peer in space}

        def arrived() -> bool:
            for peer in list(requests):
                if requests[peer].Test():
                    # A rank that was late for an earlier barrier may have left its word for that one.
                    if int.from_bytes(space[peer], "little") == self._barriers:
                        del requests[peer]
                    else:
                        requests[peer] = self._listen(peer, space[peer])
            return not requests

        _poll(arrived, limit_s)
        missing = sorted(requests)
        for request in requests.values():
            request.Cancel()
            request.Wait()
        verdict = b"".join(number.to_bytes(8, "little") for number in (self._barriers, *missing))
        for peer in space:
            if peer not in missing:
                self._mpi.Send((verdict, len(verdict), MPI.BYTE), peer, self._comm.own_tag(_VERDICT))
        return missing

    def _report_arrival(self, limit_s: float | None) -> list[int]:
        number = self._barriers.to_bytes(8, "little")
        self._mpi.Send((number, 8, MPI.BYTE), 0, self._comm.own_tag(_ARRIVE))
        verdict = bytearray(8 * self.size)
        status = MPI.Status()
        request = self._mpi.Irecv((verdict, len(verdict), MPI.BYTE), 0, self._comm.own_tag(_VERDICT))
        if not _poll(lambda: request.Test(status), None if limit_s is None else limit_s + _GRACE_S):
            request.Cancel()
            request.Wait()
            return [0]
        words = status.Get_count(MPI.BYTE) // 8
        return [int.from_bytes(verdict[8 * i : 8 * i + 8], "little") for i in range(1, words)]

    def _listen(self, peer: int, space: bytearray) -> Any:
        return self._mpi.Irecv((space, 8, MPI.BYTE), peer, self._comm.own_tag(_ARRIVE))


def _poll(ready: Any, limit_s: float | None) -> bool:
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if limit_s is not None and waited > limit_s:
            return False
        if waited > _SPIN_S:
            time.sleep(_PAUSE_S)
    return True
