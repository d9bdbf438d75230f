"""Calls of a native group in torch's three forms: synchronous, asynchronous, and in a batch.

torch's option objects have ``asyncOp``; its coalescing manager begins and ends a batch, whose calls
return at once and whose works are waited for as one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from mpidist.c10d.reductions import Options
from mpidist.c10d.work import ENDED, TorchWork, WorkList
from mpidist.comm.algorithms.reduce_op import ReduceOp as NativeReduceOp
from mpidist.comm.execution.work import Work as NativeWork
from mpidist.comm.group import ProcessGroup
from mpidist.comm.messages.request_work import RequestWork
from mpidist.dynamo import untraced

_FLAGS = 1024  # one-element works kept alive
_here = threading.local()  # .answer: the answer to this thread's operator call


@untraced
class Calls:
    """Calls of one native group.

    Args:
        native: The native group.

    Attributes:
        native: The native group.
        all_reduce_at_once: The native group's fast path; within a batch it refuses every call.
        flags: Works of the latest asynchronous all-reduces of one element. torch's reducer keeps
            that of Join in C++ until the first gradient. Without a Python reference the Python half
            of the work would be freed, and C++ would wait in the base class without end.
    """

    def __init__(self, native: ProcessGroup) -> None:
        self.native = native
        self.all_reduce_at_once = native.all_reduce_at_once
        self.flags: deque[Work] = deque(maxlen=_FLAGS)
        self._batch: deque[NativeWork | RequestWork | WorkList] | None = None

    def call(
        self, method: Callable[..., Any], result: object, opts: Options | None, *args: object
    ) -> Work:
        """Call a method of the native group as the options ask; the result is for the future."""
        if opts is not None and not opts.asyncOp and self._batch is None:
            method(*args)
            return ENDED
        return self.started(method(*args, async_op=True), result)

    def hand_out(self, native: NativeWork | WorkList, result: object, opts: Options | None) -> Work:
        """Return torch's work for a native one; wait for it before, if the options ask for it."""
        if opts is not None and not opts.asyncOp and self._batch is None:
            native.wait()
            return ENDED
        return self.started(native, result)

    def started(self, native: NativeWork | RequestWork | WorkList, result: object) -> Work:
        """Return torch's work for a native one, collective or message, that has been started.

        All works of the group pass here, so a batch misses none.
        """
        batch = self._batch
        if batch is not None:
            # An exception that leaves torch's manager does not end the batch.
            while batch and _needs_no_wait(batch[0]):
                batch.popleft()
            batch.append(native)
        return TorchWork(native, result)

    def sent(self, native: RequestWork, tensors: object) -> Work:
        """Return torch's work for the native work of a send."""
        if native.is_success():
            return ENDED  # MPI has taken a short message; saves an object of C++
        return self.started(native, tensors)

    def begin_batch(self) -> None:
        """Make the calls from here on parts of a batch."""
        self._batch, self.all_reduce_at_once = deque(), _refuse

    def end_batch(self) -> Work:
        """Return one work for the calls of the batch."""
        works, self._batch = self._batch or (), None
        self.all_reduce_at_once = self.native.all_reduce_at_once
        return TorchWork(WorkList(works), [])


@untraced
class Answer:
    """Answer to an operator call of this thread: the work of our Backend, or torch's own.

    torch's C++ hands a Python work on in a holder of its own, which forwards ``wait`` and
    ``get_future`` alone; the answer brings the Python work itself back to the Python caller.
    """

    def __init__(self) -> None:
        self._work: Work | None = None

    def __enter__(self) -> Answer:
        self._before = getattr(_here, "answer", None)
        _here.answer = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _here.answer = self._before

    def to(self, handle: Work) -> Work:
        """Return the work of our Backend if it served the call, else the operator's."""
        return handle if self._work is None else self._work

    def give(self, work: Work) -> None:
        """Set the work of our Backend."""
        self._work = work


@untraced
def answered(work: Work) -> Work:
    """Return a work of our Backend, also as the answer to the operator call which led to it."""
    asked: Answer | None = getattr(_here, "answer", None)
    if asked is not None:
        asked.give(work)
    return work


def _needs_no_wait(work: NativeWork | RequestWork | WorkList) -> bool:
    """Return whether a work has ended, without an error, on the host."""
    return (
        work.is_completed()
        and work.exception() is None
        and not any(tensor.is_cuda for tensor in work.tensors)
    )


def _refuse(tensor: torch.Tensor, op: NativeReduceOp) -> bool:
    return False
