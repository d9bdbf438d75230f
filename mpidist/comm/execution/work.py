"""``Work``: the handle of a collective that the group's thread executes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.execution import profiling
from mpidist.comm.memory.stream import Event
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout
from mpidist.future import Future


def seconds(timeout: float | timedelta | None) -> float | None:
    """Convert torch's forms of a timeout to seconds; None and zero mean no timeout.

    torch's C++ passes zero to ``Work.wait`` for no timeout (``kNoTimeout``), and reads zero so in
    ``init_process_group``.

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
    """Handle of a collective that the group's thread executes.

    Attributes:
        operation: The name of the collective.
        tensors: The outputs, kept alive until the handle is dropped.
    """

    __slots__ = ("future", "operation", "tensors", "where")

    def __init__(
        self,
        operation: str,
        tensors: Sequence[torch.Tensor],
        where: str,
        events: Sequence[Event] | None = None,
        fence: Callable[[], Event] | None = None,
    ) -> None:
        self.operation = operation
        self.tensors = tensors
        self.where = where
        # On a device the results are complete behind the events, which the executing thread adds.
        self.future: Future[Sequence[torch.Tensor]] = Future(events, fence)

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self.future.done()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end.

        Blocks: the host, until MPI has returned. For CUDA tensors the current stream then waits
        for the results; the host does not.

        Raises:
            CommTimeout: Not ended within ``timeout``; the operation continues.
            MpidistError: The error of the operation.
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
        """Return the error of an ended operation, else None."""
        return self.future.exception() if self.future.done() else None

    def result(self) -> Sequence[torch.Tensor]:
        """Return the output tensors of an ended operation."""
        return self.future.value()

    def get_future(self) -> Future[Sequence[torch.Tensor]]:
        """Return a future of the output tensors; its callbacks run in the group's thread."""
        return self.future

    def source_rank(self) -> int:
        """Return -1: a collective has no sender."""
        return -1
