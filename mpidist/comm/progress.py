"""Who executes a group's collectives: the caller's own thread while nothing is queued, else the group's thread, in order.

One group has one communicator, and MPI matches its collectives by the order in which a rank enters
them. So there is one queue per group, an asynchronous call on one rank matches a synchronous one on
another, and a synchronous call waits behind the queue. An operation issued from the group's own
thread (a future's callback) executes at once, ahead of the queue: whatever started it has ended,
and every rank's callback comes at the same place of the order.

A thread that is ``at_once`` executes several stages as one operation: whatever it issues, on any
group, has ended when the call returns, asynchronous or not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpidist.comm.mpi import runtime
from mpidist.errors import GroupError
from mpidist.future import Future

Execute = Callable[[], Any]

_here = threading.local()


@contextmanager
def at_once() -> Iterator[None]:
    """Have all operations that this thread issues meanwhile end before their calls return."""
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
    """The order of one group.

    Attributes:
        pending: Asynchronous operations that have not ended.
    """

    def __init__(self, name: str) -> None:
        self.pending = 0
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Execute] | None] = queue.SimpleQueue()
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None
        self._closed = False
        # Re-entrant, because callbacks in the group's thread issue collectives.
        self.lock = threading.RLock()
        runtime.close_at_exit(self)

    def queued(self) -> int:
        """Return the number of operations that wait in the queue."""
        return self._queue.qsize()

    def is_own_thread(self) -> bool:
        """Say whether this is the group's thread."""
        return self._thread_id == threading.get_ident()

    def try_enter(self) -> bool:
        """Take the door for a synchronous call, if it need not wait behind others; the caller releases ``door``.

        The group's own thread always enters: it may have to wait for a synchronous call of another
        thread to end.
        """
        if self._thread_id == threading.get_ident():
            return self.lock.acquire()
        return not self.pending and self.lock.acquire(blocking=False)

    def submit(self, future: Future[Any], execute: Execute) -> None:
        """Queue ``execute(*args)``, and complete ``work`` with its tensors or with what it raised.

        From the group's own thread, it executes before this returns.
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

    def run(self, future: Future[Any], execute: Execute) -> None:
        """Execute ``execute(*args)`` now, behind what is queued, and complete ``work``; what it raises is in ``work`` alone."""
        if self.try_enter():
            try:
                _complete(future, execute)
            finally:
                self.lock.release()
            return
        self.submit(future, execute)
        future.wait_quietly()

    def close(self, timeout_s: float) -> None:
        """Let what was queued end, then stop the thread; operations that do not end in time are reported.

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
        """Let the thread end once what was queued has ended; nobody waits for it."""
        if not self._closed and self._thread is not None:
            self._closed = True
            self._queue.put(None)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        while (item := self._queue.get()) is not None:
            self._execute(*item)
            item = None  # while the thread sleeps, it must not keep the last tensors alive

    def _execute(self, future: Future[Any], execute: Execute) -> None:
        with self.lock:
            outcome = _outcome(execute)
            if future.has_callbacks():
                # Callbacks may issue collectives, which precede those of other threads.
                try:
                    _set(future, *outcome)
                finally:
                    self._count_down()
                return
        # The count falls first, so that the thread that waits can go on without queueing.
        self._count_down()
        _set(future, *outcome)

    def _count_down(self) -> None:
        with self._count_lock:
            self.pending -= 1


def _complete(future: Future[Any], execute: Execute) -> None:
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
