"""MPI calls under ``MPI_THREAD_SERIALIZED``, where one thread at a time may be in MPI.

A lock held during a blocking collective would deadlock two threads on two ranks. So each blocking
call becomes a non-blocking one and a loop of tests, and the lock is free between two tests. At
``MPI_THREAD_MULTIPLE`` nothing of this is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi, MpiCalls, wait_yielding

_lock = threading.RLock()


def serialized(comm: MPI.Comm) -> MpiCalls:
    """Return a communicator whose calls hold the lock; waits release the lock between tests.

    What the communicator creates (requests, messages, communicators) is locked in the same way.
    """
    return MpiCalls(cast("MPI.Comm", _Locked(comm)), wait_yielding)


def locked(create: Callable[[], MPI.Comm]) -> Mpi:
    """Return the communicator that ``create`` makes, in this thread level's form."""
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        return create()
    with _lock:
        return serialized(create())


class _Locked:
    """An MPI communicator, request or message whose every call holds the lock."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with _lock:
                result = method(*args, **kwargs)
            if isinstance(result, MPI.Comm):
                return result if result == MPI.COMM_NULL else serialized(result)
            return _Locked(result) if isinstance(result, (MPI.Request, MPI.Message)) else result

        self.__dict__[name] = call
        return call

    def Wait(self, status: MPI.Status | None = None) -> None:
        """See MPI_Wait."""
        wait_yielding(self, status)
