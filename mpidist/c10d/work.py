"""torch's view of our works: its ``Work`` and ``Future``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from mpidist.comm.work import RequestWork, seconds
from mpidist.comm.work import Work as NativeWork
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout
from mpidist.future import completed


@untraced
class _Ended(Work):
    """What a synchronous call returns: there is nothing to wait for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result([])
        return future


ENDED = _Ended()


@untraced
class TorchWork(Work):
    """torch's handle of one of our works."""

    def __init__(self, native: NativeWork | RequestWork | WorkList, result: Any) -> None:
        super().__init__()
        self._native = native
        self._result = result
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See Work.wait."""
        return self._native.wait(timeout)

    def is_completed(self) -> bool:
        """See Work.is_completed."""
        return self._native.is_completed()

    def is_success(self) -> bool:
        """Say whether it has ended and well."""
        return self._native.is_completed() and self._native.exception() is None

    def exception(self) -> Any:
        """See Work.exception."""
        return self._native.exception()

    def synchronize(self) -> None:
        """Wait; for CUDA tensors, let the current stream wait."""
        self.wait()

    def result(self) -> Any:
        """Return the output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return a receive's sender."""
        return self._native.source_rank()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a torch future of the output tensors."""
        if self._future is None:
            devices = sorted({str(t.device) for t in self._native.tensors if t.is_cuda})
            ended: Future[Any] = Future(devices=devices) if devices else Future()  # type: ignore[arg-type]
            # What raises in a callback is an error for C++ as well. Future.set_exception is one for
            # Python alone: torch's reducer takes the exception for the tensors.
            self._future = ended.then(self._outcome)
            if isinstance(self._native, RequestWork):
                # MPI makes no callbacks: a message's future is complete when it is handed out
                self.wait()
            self._native.get_future().add_done_callback(lambda native: ended.set_result(None))
        return self._future

    def _outcome(self, ended: Future[Any]) -> Any:
        error = self._native.exception()
        if error is not None:
            raise error
        # complete; makes this thread's stream wait, which torch's future then hands on
        self._native.wait()
        return self._result


@untraced
class TorchReceive(TorchWork):
    """torch's handle of a receive, which a timeout of the group ends."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See RequestWork.wait; past the group's timeout the receive is withdrawn, past ``timeout`` it stays posted."""
        try:
            return super().wait(timeout)
        except CommTimeout:
            # torch's recv drops the handle: a receive that stayed posted would take the message of
            # the next one.
            if seconds(timeout) is None and isinstance(self._native, RequestWork):
                self._native.cancel()
            raise


class WorkList:
    """Works that end together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self.tensors = [tensor for work in works for tensor in work.tensors]

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Say whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Any:
        """Return what went wrong with the first that failed."""
        return next(
            (error for work in self._works if (error := work.exception()) is not None), None
        )

    def source_rank(self) -> int:
        """Return -1: there is no one sender."""
        return -1

    def get_future(self) -> Any:
        """Return the last one's future."""
        # One order per group: when the last has ended, all have.
        return self._works[-1].get_future() if self._works else completed([])
