"""Backward pass at its initiator: end, errors, and timeout without progress.

Each worker reports once that its part is complete, with the ranks that it sent gradients to. The
pass ends when all workers named in these reports are complete. An error on any worker, or the loss
of a worker, ends the pass at once. After the RPC timeout without progress the initiator probes the
workers of the pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from mpidist.autograd.smart import Survey
from mpidist.errors import CommTimeout, MpidistError
from mpidist.rpc.threads.call import Call

_REPORT_S = 5.0  # shortest wait for reports

# Waits for a call, at most until its deadline.
Wait: TypeAlias = Callable[[Call], None]
# Probes the members of a pass; returns this worker's idle time in seconds, and missing gradients.
Probe: TypeAlias = "Callable[[Pass], tuple[float, list[str]]]"


class Pass:
    """A backward pass that began on this worker.

    Args:
        key: Number of the pass.
        context: Number of the context.
        me: Rank of this worker.

    Attributes:
        survey: The answers of the workers in SMART mode, else None.
        error: The first error, or None.
        me: Rank of this worker.
        mentioned: Ranks that are known to have a part.
    """

    def __init__(self, key: int, context: int, me: int) -> None:
        self.key = key
        self.context = context
        self.error: BaseException | None = None
        self.survey: Survey | None = None
        self.me = me
        self.mentioned = {me}
        self._complete: set[int] = set()
        self._reports: dict[int, tuple[float, list[str]]] = {}
        self._progress = 0
        self._lock = threading.Lock()
        self._call = Call(me, "a backward pass", 0.0)

    def expect(self, workers: Iterable[int]) -> None:
        """Record workers that have a part."""
        with self._lock:
            self.mentioned.update(workers)

    def complete(self, worker: int, sent_to: Iterable[int]) -> None:
        """Record that a worker's part is complete, and the ranks that it sent gradients to."""
        with self._lock:
            self._complete.add(worker)
            self.mentioned.update(sent_to)
            is_over = self.mentioned <= self._complete
        self.progress()
        if is_over:
            self._call.finish()

    def progress(self) -> None:
        """Record progress."""
        self._progress += 1

    def report(
        self, worker: int, idle_s: float, missing: list[str], sent_to: Iterable[int]
    ) -> None:
        """Record a worker's answer to ``Notice.PROBE``."""
        with self._lock:
            self.mentioned.update(sent_to)
            self._reports[worker] = idle_s, missing

    def fail(self, error: BaseException) -> None:
        """End the pass with an error; only the first error is kept."""
        with self._lock:
            if self.error is None and not self._call.done:
                self.error = error
        self._call.finish()

    def involves(self, worker: int) -> bool:
        """Return whether a worker has an incomplete part or an unanswered survey question."""
        survey = self.survey
        if survey is not None and survey.expects(worker):
            return True
        return worker in self.mentioned and worker not in self._complete

    def members(self) -> set[int]:
        """Return the other workers that are known to have an incomplete part."""
        with self._lock:
            return self.mentioned - self._complete - {self.me}

    def wait(self, wait: Wait, timeout_s: float, probe: Probe, names: Sequence[str]) -> None:
        """Wait for the end of the pass.

        Args:
            wait: Waits for a call, at most until its deadline, as ``rpc.Polling.wait``.
            timeout_s: Longest time without progress in seconds; 0 for no limit.
            probe: Sends PROBE to the members and returns this worker's own idle time in seconds
                and missing gradients.
            names: Names of the workers, by rank.

        Raises:
            CommTimeout: There was no progress.
            Exception: The error that ended the pass.
        """
        call = self._call
        while not call.done:
            before, since = self._progress, time.monotonic()
            call.deadline = since + timeout_s if timeout_s > 0 else float("inf")
            wait(call)
            if call.done or self._progress != before:
                continue
            if time.monotonic() < call.deadline:
                raise MpidistError("RPC was shut down on this worker during a backward pass")
            self._examine(wait, timeout_s, probe, names)
        if self.error is not None:
            try:
                raise self.error
            finally:
                # The error's traceback refers to the pass. This cycle would keep the graph until
                # Python's garbage collector runs.
                self.error = None

    def _examine(self, wait: Wait, timeout_s: float, probe: Probe, names: Sequence[str]) -> None:
        """Probe all members; raise if none has received a gradient for the whole time."""
        call, before = self._call, self._progress
        self._reports.clear()
        own_idle_s, missing = probe(self)
        members = self.members()
        end = time.monotonic() + max(_REPORT_S, timeout_s)
        while not call.done and not members <= set(self._reports) and time.monotonic() < end:
            call.deadline = time.monotonic() + 0.01
            wait(call)
        with self._lock:
            reports = dict(self._reports)
            is_new = bool(self.mentioned - self._complete - {self.me} - members)
        idle_s = min([own_idle_s, *(idle for idle, _ in reports.values())])
        if call.done or self._progress != before or is_new or idle_s < timeout_s / 2:
            return
        lines = [f"{names[self.me]} waits for {text}" for text in missing]
        for worker in sorted(members):
            lines += [
                f"{names[worker]} waits for {text}"
                for text in reports.get(worker, (0, ["an answer of its own"]))[1]
            ]
        raise CommTimeout(
            f"backward in context {self.context}: no gradient has come for {timeout_s:g} s (the "
            "RPC timeout). FAST mode waits for the gradients of everything that was sent; results "
            'that are not used get none. Pass mode="smart" to await only what the roots depend '
            f"on. {'; '.join(lines) or 'No part is complete'}"
        )
