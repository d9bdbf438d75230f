"""``torch.distributed.Work`` objects over native works, and their futures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from mpidist.c10d import work_registry
from mpidist.comm.execution.work import Work as NativeWork
from mpidist.comm.execution.work import seconds
from mpidist.comm.messages.request_work import RequestWork
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout
from mpidist.exception_copy import copy_exception
from mpidist.future import Future as NativeFuture
from mpidist.future import completed


@untraced
class _Ended(Work):
    """The completed work that synchronous calls return."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[list[object]]:
        future: Future[list[object]] = Future()
        future.set_result([])
        return future


ENDED = _Ended()


@untraced
class TorchWork(Work):
    """``torch.distributed.Work`` of a native work."""

    __slots__ = ("_future", "_native", "_registered", "_result")

    def __init__(self, native: NativeWork | RequestWork | WorkList, result: object) -> None:
        Work.__init__(self)  # not super(), which costs 0.1 us
        self._native = native
        self._result = result
        self._future: Future[object] | None = None
        self._registered = work_registry.enter(self, result) if work_registry.is_used() else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See Work.wait.

        The group's timeout withdraws receives; after ``timeout`` they stay posted.
        """
        try:
            ended = self._native.wait(timeout)
        except CommTimeout:
            # torch's recv and its coalescing manager drop the handle, and a receive that stays
            # posted would match the message of the next receive.
            if seconds(timeout) is None:
                for message in _messages(self._native):
                    message.cancel()
            raise
        if self._registered:
            tensors, self._registered = self._registered, None
            work_registry.leave(tensors)
        return ended

    def is_completed(self) -> bool:
        """See Work.is_completed."""
        return self._native.is_completed()

    def is_success(self) -> bool:
        """Return whether the work has completed without an error."""
        return self._native.is_completed() and self._native.exception() is None

    def exception(self) -> BaseException | None:
        """See Work.exception."""
        return self._native.exception()

    def synchronize(self) -> None:
        """Wait; for CUDA tensors only the current stream waits."""
        self.wait()

    def result(self) -> object:
        """Return the output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender's rank of a receive."""
        return self._native.source_rank()

    _source_rank = source_rank

    def get_future(self) -> Future[object]:
        """Return a torch future of the output tensors."""
        if self._future is None:
            devices: list[Any] = sorted(
                {str(t.device) for t in self._native.tensors if t is not None and t.is_cuda}
            )
            ended: Future[None] = Future(devices=devices) if devices else Future()
            # An exception raised in a callback is an error for C++, too. Future.set_exception marks
            # an error for Python only, and torch's reducer would take the exception for tensors.
            self._future = ended.then(partial(_outcome, self._native, self._result))
            # MPI has no completion callbacks, so the future of messages is returned complete.
            if _messages(self._native):
                self.wait()
            self._native.get_future().add_done_callback(lambda native: ended.set_result(None))
        return self._future


def _outcome(
    native: NativeWork | RequestWork | WorkList, result: object, ended: Future[None]
) -> object:
    """Return the result of a work that has ended, or raise its error."""
    error = native.exception()
    if error is not None:
        raise copy_exception(error)
    # Returns at once; lets this thread's stream wait, and torch's future records the stream.
    native.wait()
    return result


class WorkList:
    """Several works as one; lists among them are flattened.

    Attributes:
        works: The works.
    """

    def __init__(self, works: Iterable[NativeWork | RequestWork | WorkList]) -> None:
        self.works: list[NativeWork | RequestWork] = []
        for work in works:
            self.works += work.works if isinstance(work, WorkList) else (work,)
        self.tensors: list[torch.Tensor] = [
            tensor for work in self.works for tensor in work.tensors
        ]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all works, at most ``timeout`` together.

        Raises:
            CommTimeout: Not all have ended within ``timeout``; the operations continue.
        """
        limit = seconds(timeout)
        if limit is None:
            for work in self.works:
                work.wait()
            return True
        deadline = time.monotonic() + limit
        for work in self.works:
            # Zero would be no limit.
            left = max(deadline - time.monotonic(), sys.float_info.min)
            try:
                work.wait(left)
            except CommTimeout:
                if work.is_completed():
                    raise  # the operation's own
                raise CommTimeout(f"{work.where} did not end within {limit:g} s") from None
        return True

    def is_completed(self) -> bool:
        """Return whether all works have completed."""
        return all(work.is_completed() for work in self.works)

    def exception(self) -> BaseException | None:
        """Return the error of the first failed work, or None."""
        return next((error for work in self.works if (error := work.exception()) is not None), None)

    def source_rank(self) -> int:
        """Return -1, because the works may have several senders."""
        return -1

    def get_future(self) -> NativeFuture[Sequence[torch.Tensor]]:
        """Return the last collective's future."""
        # A group completes its collectives in order. Messages have ended before (``TorchWork``).
        collectives = [work for work in self.works if not isinstance(work, RequestWork)]
        return collectives[-1].get_future() if collectives else completed([])


def _messages(work: NativeWork | RequestWork | WorkList) -> list[RequestWork]:
    """Return the messages among works, which nobody completes but a thread that waits for them."""
    works = work.works if isinstance(work, WorkList) else (work,)
    return [each for each in works if isinstance(each, RequestWork)]
