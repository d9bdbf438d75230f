"""Handles of operations under way: ``Work`` of a collective, ``RequestWork`` of a point-to-point message."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.autograd import profiler as torch_profiler

from mpidist.comm import profiling
from mpidist.comm.memory.stream import Event
from mpidist.comm.mpi import exited_ranks
from mpidist.comm.mpi.mpi_errors import is_mpi_error, is_over, translate
from mpidist.comm.op_status import Journal
from mpidist.comm.posted_receives import match_all
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout
from mpidist.future import Future

# a wait tests without pause for this long: most messages on a node arrive within it
_SPIN_S = 200e-6
_YIELD_S = 5e-3  # then it gives its core away between two tests, and after this long it sleeps
_SLEEP_S = 50e-6


def seconds(timeout: float | timedelta | None) -> float | None:
    """Turn torch's ways to give a timeout into seconds; None and zero mean no timeout.

    Zero is what torch's C++ hands to ``Work.wait`` for "none" (``kNoTimeout``), and what it takes
    so in ``init_process_group``.

    Raises:
        TypeError: Neither a number, a timedelta, nor None.
        ValueError: Negative.
    """
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"timeout must be seconds, a timedelta or None; got {timeout!r}")
    if value < 0:
        raise ValueError(f"timeout must not be negative; got {value:g} s")
    return float(value) or None


@untraced
class Work:
    """A collective that the group's thread executes.

    Attributes:
        operation: Its name.
        tensors: The outputs, kept alive until the handle is dropped.
    """

    __slots__ = ("future", "operation", "tensors", "where")

    def __init__(
        self,
        operation: str,
        tensors: Sequence[Any],
        where: str,
        events: Sequence[Event] | None = None,
        fence: Callable[[], Any] | None = None,
    ) -> None:
        self.operation = operation
        self.tensors = tensors
        self.where = where
        # The executing thread fills ``events``: on a device, the results are behind them.
        self.future: Future[Sequence[Any]] = Future(events, fence)

    def is_completed(self) -> bool:
        """Say whether it has ended, well or not."""
        return self.future.done()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end.

        Blocks: the host, until MPI has returned; then, for CUDA tensors, the current stream waits
        for the results (the host does not).

        Raises:
            CommTimeout: Not ended within ``timeout`` (seconds); the operation goes on.
            MpidistError: What the operation itself raised.
        """
        limit, wait = seconds(timeout), self.future.wait
        if torch_profiler._is_profiler_enabled and not self.future.done():
            wait = profiling.waiting(wait, self.operation)
        if limit is None or self.future.done():
            wait()
        else:
            try:
                wait(limit)
            except CommTimeout:
                if not self.future.done():
                    raise CommTimeout(f"{self.where} did not end within {limit:g} s") from None
                self.future.wait()
        return True

    def exception(self) -> BaseException | None:
        """Return what went wrong, if it has ended and something did."""
        return self.future.exception() if self.future.done() else None

    def result(self) -> Sequence[Any]:
        """Return the output tensors of an ended operation."""
        return self.future.value()

    def get_future(self) -> Future[Sequence[Any]]:
        """Return a future of the output tensors; its callbacks run in the group's thread."""
        return self.future

    def source_rank(self) -> int:
        """Return the sender's rank in the group; -1, as this is no receive."""
        return -1


# requests under way whose handles were dropped, and the memory that MPI works on
_orphans: deque[tuple[Any, Any]] = deque()
_releasing = threading.Lock()


def release_orphans() -> None:
    """Let go of the memory of messages that have ended since their handles were dropped."""
    if not _orphans or not _releasing.acquire(blocking=False):
        return
    try:
        for _ in range(len(_orphans)):
            request, memory = _orphans.popleft()
            if not is_over(request):
                _orphans.append((request, memory))
    finally:
        _releasing.release()


@untraced
class RequestWork:
    """A send or receive that MPI carries out; the thread that waits makes it advance.

    A handle that is dropped before the end leaves the message under way, and its memory alive.
    """

    __slots__ = (
        "_done", "_error", "_events", "_finish", "_future", "_journal", "_peers", "_request", "_source", "_timeout_s", "kept",
        "operation", "tensors", "where",
    )  # fmt: skip

    def __init__(
        self,
        operation: str,
        tensor: Any,
        request: Any,
        where: str,
        journal: Journal,
        timeout_s: float | None,
        finish: Callable[[], tuple[int, Sequence[Event]]] | None = None,
        peers: Sequence[int] = (),
    ) -> None:
        self.operation = operation
        self.tensors = (tensor,)
        self.where = where
        self._request = request
        self._journal = journal
        self._timeout_s = timeout_s
        self._finish = finish  # stores the data; returns the sender's rank and events
        self._events: list[Event] = []  # on a device, the data is complete behind these
        self._peers = peers  # world ranks without which it cannot end
        self._done = False
        self._error: BaseException | None = None
        self._source = -1
        self._future: Future[Sequence[Any]] | None = None
        self.kept: Any = None

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            _orphans.append((self._request, (self.kept, self.tensors)))

    def is_completed(self) -> bool:
        """Test once whether it has ended."""
        return self._done or self._test()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end; without ``timeout``, at most the group's.

        Blocks: the calling thread, which makes MPI advance meanwhile. For a send: until the tensor
        may be changed.

        Raises:
            CommTimeout: Not ended in time. The message is still under way, and ``wait`` may be
                called again.
            RankFailureError: The peer died, or has come to the end of its program.
        """
        if not self._done and not self._test():
            poll = (
                profiling.waiting(self._poll, self.operation)
                if torch_profiler._is_profiler_enabled
                else self._poll
            )
            poll(seconds(timeout) or self._timeout_s)
        if self._error is not None:
            raise self._error
        for event in self._events:
            event.block_current_stream()
        return True

    def cancel(self) -> None:
        """Withdraw a receive that nothing has matched, so that its buffer is free again."""
        if not self._done:
            with contextlib.suppress(Exception):
                self._request.Cancel()
                self._request.Wait()
            self._done = True
            self._error = self._error or CommTimeout(f"{self.where} was withdrawn")

    def exception(self) -> BaseException | None:
        """Return what went wrong, if it has ended and something did."""
        return self._error

    def result(self) -> Sequence[Any]:
        """Return the tensors of an ended operation."""
        self.wait()
        return self.tensors

    def get_future(self) -> Future[Sequence[Any]]:
        """Return a future of the tensors, complete by the time ``wait`` returns."""
        if self._future is None:
            self._future = Future(self._events)
            if self._done:
                self._settle()
        return self._future

    def source_rank(self) -> int:
        """Return the sender's rank in the group once a receive has ended, else -1."""
        return self._source

    def _test(self) -> bool:
        try:
            if not self._request.Test():
                return False
            if self._finish is not None:
                self._source, events = self._finish()
                self._events += events
        except Exception as error:
            self._error = translate(error, self.where) if is_mpi_error(error) else error
        self._done = True
        self._settle()
        return True

    def _settle(self) -> None:
        if self._future is not None and not self._future.done():
            if self._error is not None:
                self._future.set_exception(self._error)
            else:
                self._future.set_result(self.tensors)

    def _poll(self, limit_s: float | None) -> None:
        start = time.monotonic()
        self._journal.enter_wait(id(self), self.operation, self.tensors[0])
        try:
            while not self._test():
                match_all()  # what this message waits for may wait for another receive of this rank
                waited = time.monotonic() - start
                if limit_s is not None and waited > limit_s:
                    raise CommTimeout(f"{self.where} did not end within {limit_s:g} s")
                if waited > _YIELD_S:
                    if exited_ranks.all_ended(self._peers) and not self._test():
                        raise exited_ranks.failure(self.where, self._peers)
                    time.sleep(_SLEEP_S)
                elif waited > _SPIN_S:
                    os.sched_yield()
        finally:
            self._journal.leave_wait(id(self))
