"""Termination detection: all workers wait, and no message is in flight between them.

Each worker waits until it has no call without an answer, no running callback of a future and no
unanswered request, and reports its counts to rank 0. Once all have reported, rank 0 compares: if
two successive rounds have the same sums, and as many one-way messages were received as sent,
nothing has moved between the rounds and nothing can move again (Mattern, "Algorithms for
distributed termination detection", Distributed Computing 2 (1987), § 4: the four-counter method).
Point-to-point messages carry the reports, so a worker that gives up leaves no collective of MPI
incomplete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from mpidist.comm.mpi import rank_ranges
from mpidist.errors import FrameError

_SLEEP_S = 2e-4  # between two readings of the counts
_CHECK_S = 0.1  # between two checks for workers that have left
COORDINATOR = 0
_PROCEED, _AGAIN = 1, 0
# Rounds that a worker may have given up since the coordinator's current one.
_MAX_ROUNDS_AHEAD = 1000
_REPORT = 5  # numbers in a report: the round, and the counts of ``activity`` but the first

Counts = tuple[int, ...]


class Quiescence:
    """Termination detection on one worker.

    Args:
        rank: This worker's rank.
        size: The number of workers.
        send: ``send(False, numbers)`` sends a report (round, counts …) to the coordinator;
            ``send(True, numbers)`` sends the verdict (round, verdict) to all workers.
        activity: Returns the number of calls, with their callbacks, and requests of this worker
            that have not ended, and monotonic counts of calls, answers, one-way messages sent, and
            one-way messages received.
        check: ``check(deadline, reason)`` raises if the wait must end.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[bool, Sequence[int]], None],
        activity: Callable[[], Counts],
        check: Callable[[float, Callable[[], str]], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._send = send
        self._activity = activity
        self._check = check
        # By rank: the last round reported, and its counts.
        self._reports: dict[int, tuple[int, Counts]] = {}
        self._decided = -1  # the last round with a verdict
        self._last: Counts | None = None  # the sums of the previous round
        self._verdicts: dict[int, int] = {}
        self._verdict_arrived = threading.Event()
        self._round = 0

    def receive_report(self, source: int, numbers: Sequence[int]) -> None:
        """Store a worker's report, on the coordinator; after the last one, send the verdict.

        Raises:
            FrameError: This is not the coordinator, or the report has a wrong length or round.
        """
        if self._rank != COORDINATOR or len(numbers) != _REPORT:
            raise FrameError(
                f"a report of {len(numbers)} numbers from rank {source} to rank {self._rank}"
            )
        number, *counts = numbers
        if not self._decided < number <= self._round + _MAX_ROUNDS_AHEAD:
            raise FrameError(
                f"a report of round {number} from rank {source}; the last one that is over is "
                f"{self._decided}"
            )
        self._reports[source] = number, tuple(counts)
        if len(self._reports) < self._size or any(
            [other != number for other, _ in self._reports.values()]
        ):
            return
        self._decided = number
        sums = tuple(map(sum, zip(*[counts for _, counts in self._reports.values()], strict=True)))
        is_over = sums == self._last and sums[2] == sums[3]
        self._last = None if is_over else sums
        self._send(True, (number, _PROCEED if is_over else _AGAIN))

    def receive_verdict(self, source: int, numbers: Sequence[int]) -> None:
        """Store the coordinator's verdict; ignore verdicts of rounds that this worker has given up.

        Raises:
            FrameError: The sender is not the coordinator, or the verdict is of a round that this
                worker has not reported.
        """
        if source != COORDINATOR or len(numbers) != 2:
            raise FrameError(f"a verdict of {len(numbers)} numbers from rank {source}")
        number, verdict = numbers
        if number >= self._round or verdict not in (_PROCEED, _AGAIN):
            raise FrameError(
                f"a verdict {verdict} of round {number} from rank {source}; the last one here is "
                f"{self._round - 1}"
            )
        if number == self._round - 1:
            self._verdicts[number] = verdict
            self._verdict_arrived.set()

    def missing(self) -> list[int]:
        """Return the ranks that have not reported in this round; valid on the coordinator."""
        there = {rank for rank, (number, _) in self._reports.items() if number == self._round - 1}
        return [rank for rank in range(self._size) if rank not in there]

    def wait(self, deadline: float) -> None:
        """Wait until all workers have called this method and no message is in flight.

        Collective: over all workers.

        Blocks: until then.

        Args:
            deadline: For ``check``.

        Raises:
            Exception: ``check`` has raised it.
        """
        while True:
            while self._activity()[0]:
                self._check(deadline, lambda: "calls or callbacks are under way on this worker")
                time.sleep(_SLEEP_S)
            number = self._round
            self._round += 1
            self._verdict_arrived.clear()
            self._send(False, (number, *self._activity()[1:]))
            while number not in self._verdicts:
                if not self._verdict_arrived.wait(_CHECK_S):
                    self._check(deadline, self._reason)
                self._verdict_arrived.clear()
            if self._verdicts.pop(number) == _PROCEED:
                return
            time.sleep(_SLEEP_S)

    def _reason(self) -> str:
        if self._rank != COORDINATOR:
            return f"no verdict from rank {COORDINATOR}"
        return f"waiting for {rank_ranges.named(self.missing())}"
