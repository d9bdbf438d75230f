"""Queue and thread of a group, which keep its collectives in one order.

A group has one communicator, and MPI matches collectives by the order in which each rank calls
them. Asynchronous operations go through the queue of the group to its thread. A synchronous one is
executed by the calling thread if the queue is empty, and else waits behind the queue; so a
synchronous call on one rank matches an asynchronous one on another. An operation issued by the
group's own thread (by a future's callback) is executed at once, ahead of the queue: the operation
with the callback has ended, and the callbacks of all ranks have the same place in the order.

In a thread within ``at_once``, every operation has ended when the call that issues it returns,
asynchronous or not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mpidist.comm.mpi import runtime
from mpidist.errors import GroupError
from mpidist.future import Future

T = TypeVar("T")
Execute = Callable[[], Any]

_here = threading.local()


@contextmanager
def at_once() -> Iterator[None]:
    """End each operation that this thread issues in the block before the call returns."""
    before = is_at_once()
    _here.is_at_once = True
    try:
        yield
    finally:
        _here.is_at_once = before


def is_at_once() -> bool:
    """Say whether this thread is within ``at_once``."""
    return getattr(_here, "is_at_once", False)


class Progress:
    """Queue and thread of one group.

    Attributes:
        pending: Number of queued operations that have not ended.
        lock: Held while a collective is executed. Re-entrant, because callbacks in the group's
            thread issue collectives.
    """

    def __init__(self, name: str) -> None:
        self.pending = 0
        self._is_executing = False  # the group's thread, one of the pending operations
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Execute] | None] = queue.SimpleQueue()
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None
        self._closed = False
        self.lock = threading.RLock()
        runtime.close_at_exit(self)

    def queued(self) -> int:
        """Return the number of pending operations that the group's thread does not execute yet."""
        return self.pending - self._is_executing

    def is_own_thread(self) -> bool:
        """Say whether this is the group's thread."""
        return self._thread_id == threading.get_ident()

    def try_enter(self) -> bool:
        """Acquire the lock for a synchronous call, unless it must wait behind other operations.

        The group's own thread always acquires it, and may block until a synchronous call of another
        thread has ended. The caller releases the lock.
        """
        if self._thread_id == threading.get_ident():
            return self.lock.acquire()
        return not self.pending and self.lock.acquire(blocking=False)

    def submit(self, future: Future[T], execute: Callable[[], T]) -> None:
        """Queue ``execute``, and complete the future with its result or its error.

        In the group's own thread, ``execute`` has ended when this returns.
        """
        if self._closed:
            raise GroupError(f'group "{self._name}" is closed')
        if self._thread_id == threading.get_ident():
            with self.lock:
                _complete(future, execute)
            return
        with self._count_lock:
            self.pending += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=runtime.guard_thread(self._run),
                    name=f"mpidist-{self._name}",
                    daemon=True,
                )
                self._thread.start()
        self._queue.put((future, execute))

    def run(self, future: Future[T], execute: Callable[[], T]) -> None:
        """Execute behind the queue, and wait until the future is complete; raise nothing."""
        if self.try_enter():
            try:
                _complete(future, execute)
            finally:
                self.lock.release()
            return
        self.submit(future, execute)
        future.wait_quietly()

    def close(self, timeout_s: float) -> None:
        """Stop the thread after the queued operations; end the job if they do not end in time.

        Blocks: at most ``timeout_s`` seconds.
        """
        if self._closed or self._thread_id == threading.get_ident():
            return
        self._closed = True
        thread = self._thread
        if thread is None:
            return
        self._queue.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            runtime.abort(
                f'group "{self._name}" was closed while {self.pending} asynchronous operation(s) '
                "had not ended after "
                f"{timeout_s:.0f} s; wait() for every asynchronous operation before the group is "
                "destroyed"
            )

    def abandon(self) -> None:
        """End the thread after the queued operations, without a wait."""
        if not self._closed and self._thread is not None:
            self._closed = True
            self._queue.put(None)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        while (item := self._queue.get()) is not None:
            self._execute(*item)
            # The reference would keep the last tensors alive while the thread waits.
            item = None

    def _execute(self, future: Future[T], execute: Callable[[], T]) -> None:
        with self.lock:
            self._is_executing = True
            outcome = _outcome(execute)
            if future.has_callbacks():
                # Callbacks may issue collectives, which precede those of other threads.
                try:
                    _set(future, *outcome)
                finally:
                    self._count_down()
                return
        # Counted down first, so that the thread that waits can issue its next operation directly.
        self._count_down()
        _set(future, *outcome)

    def _count_down(self) -> None:
        with self._count_lock:
            self.pending -= 1
            self._is_executing = False


def _complete(future: Future[T], execute: Callable[[], T]) -> None:
    _set(future, *_outcome(execute))


def _outcome(execute: Execute) -> tuple[Any, BaseException | None]:
    try:
        return execute(), None
    except Exception as error:
        return None, error


def _set(future: Future[Any], result: Any, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
