"""``Work``: the handle of a collective that the group's thread executes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.execution import profiling
from mpidist.comm.memory.stream import Event
from mpidist.comm.recorder import recorder
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout
from mpidist.future import Future


def seconds(timeout: float | timedelta | None) -> float | None:
    """Convert torch's forms of a timeout to seconds; None, zero and too long mean no timeout.

    torch's C++ passes zero to ``Work.wait`` for no timeout (``kNoTimeout``), and reads zero so in
    ``init_process_group``. Too long is what no lock can wait for, 292 years (``timedelta.max``).

    Raises:
        TypeError: Neither a number, a timedelta, nor None.
        ValueError: Negative, or not a number.
    """
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"timeout must be seconds, a timedelta or None; got {timeout!r}")
    if not value >= 0:
        raise ValueError(f"timeout must not be negative; got {value:g} s")
    return float(value) if 0 < value < threading.TIMEOUT_MAX else None


# Guards the race between completing and making the future; held for a few instructions only.
_lock = threading.Lock()


@untraced
class Work:
    """Handle of a collective in a group's queue, which the thread that executes it completes.

    A future is made where one is asked for, and for an error: most works are only waited for.

    Args:
        operation: The name of the collective.
        tensors: The outputs.
        where: Beginning of an error's text.
        events: On a device the results are complete behind them; filled before the work is
            completed.
        fence: See ``Future``.
        help: See ``helped_by``.

    Attributes:
        operation: The name of the collective.
        tensors: The outputs, kept alive until the handle is dropped.
    """

    __slots__ = (
        "_done", "_events", "_fence", "_future", "_help",
        "operation", "tensors", "where",
    )  # fmt: skip

    def __init__(
        self,
        operation: str,
        tensors: Sequence[torch.Tensor],
        where: str,
        events: Sequence[Event] | None = None,
        fence: Callable[[], Event] | None = None,
        help: Callable[[Any], object] | None = None,
    ) -> None:
        self.operation = operation
        self.tensors = tensors
        self.where = where
        self._events = events
        self._fence = fence
        self._help = help
        # The collective has ended without an error, and before there was a future, which knows the
        # end of every other work.
        self._done = False
        self._future: Future[Sequence[torch.Tensor]] | None = None

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self._done or (self._future is not None and self._future.done())

    done = is_completed

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end.

        Blocks: the host, until MPI has returned. For CUDA tensors the current stream then waits
        for the results; the host does not.

        Raises:
            CommTimeout: Not ended within ``timeout``; the operation continues.
            MpidistError: The error of the operation.
        """
        if timeout is None and not torch_profiler._is_profiler_enabled:
            if self._help is not None and not self._done and self._future is None:
                self._help(self)
            if self._done:
                for event in self._events or ():
                    event.block_current_stream()
                return True
        self._wait_for_future(seconds(timeout))
        return True

    def wait_quietly(self) -> None:
        """Wait for the end and raise nothing; ``wait`` still raises the error."""
        if not self._done:
            self.get_future().wait_quietly()

    def exception(self) -> BaseException | None:
        """Return the error of an ended operation, else None."""
        future = self._future
        return future.exception() if future is not None and future.done() else None

    def result(self) -> Sequence[torch.Tensor]:
        """Return the output tensors of an ended operation."""
        if self._done:
            self.wait()
            return self.tensors
        return self.get_future().value()

    def get_future(self) -> Future[Sequence[torch.Tensor]]:
        """Return a future of the output tensors; its callbacks run in the group's thread."""
        if self._future is not None:
            return self._future
        made: Future[Sequence[torch.Tensor]] = Future(self._events, self._fence)
        if self._help is not None:
            made.helped_by(self._help)
        with _lock:
            future = self._future
            if future is None:
                # Complete before another thread can add a callback to it.
                if self._done:
                    made.set_result(self.tensors)
                future = self._future = made
        return future

    def source_rank(self) -> int:
        """Return -1: a collective has no sender."""
        return -1

    def helped_by(self, help: Callable[[Any], object]) -> None:
        """Have a thread that waits without a limit call ``help(self)`` first; see ``Future``."""
        self._help = help

    def has_callbacks(self) -> bool:
        """Return whether completing would run callbacks."""
        future = self._future
        return future is not None and future.has_callbacks()

    def ends(self, waited: object) -> bool:
        """Return whether a thread that waits for ``waited`` waits for this operation."""
        return waited is self or (waited is self._future and waited is not None)

    def sleep(self, timeout_s: float) -> bool:
        """Wait until complete, at most ``timeout_s`` seconds; return whether it is."""
        return self._done or self.get_future().sleep(timeout_s)

    def end(
        self, value: Sequence[torch.Tensor] | None, error: BaseException | None
    ) -> Callable[[], None] | None:
        """Complete with ``tensors`` or an error; see ``Future.end``."""
        if error is not None:
            return self.get_future().end(None, error)
        with _lock:
            future = self._future
            self._done = future is None
        return None if future is None else future.end(value, None)

    def _wait_for_future(self, limit: float | None) -> None:
        future = self.get_future()
        wait = future.wait
        if torch_profiler._is_profiler_enabled and not future.done():
            wait = profiling.waiting(wait, self.operation)
        if future.done():
            wait()
            return
        try:
            with recorder.recorded("wait", f"wait for {self.operation}"):
                wait(limit)
        except CommTimeout:
            if not future.done():
                raise CommTimeout(f"{self.where} did not end within {limit:g} s") from None
            future.wait()
