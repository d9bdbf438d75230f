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
from mpidist.comm.work import Work
from mpidist.errors import GroupError

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
        self._queue: queue.SimpleQueue[tuple[Work, Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None
        self._closed = False
        # Held while a collective executes. Re-entrant: the group's thread issues more from its
        # callbacks.
        self.door = threading.RLock()
        runtime.close_at_exit(self)

    def is_own_thread(self) -> bool:
        """Say whether this is the group's thread."""
        return self._thread_id == threading.get_ident()

    def try_enter(self) -> bool:
        """Take the door for a synchronous call, if it need not wait behind others; the caller releases ``door``.

        The group's own thread always enters: it may have to wait for a synchronous call of another
        thread to end.
        """
        if self._thread_id == threading.get_ident():
            return self.door.acquire()
        return not self.pending and self.door.acquire(blocking=False)

    def submit(self, work: Work, execute: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Queue ``execute(*args)``, and complete ``work`` with its tensors or with what it raised.

        From the group's own thread, it executes before this returns.
        """
        if self._closed:
            raise GroupError(f'group "{self._name}" is closed')
        if self._thread_id == threading.get_ident():
            with self.door:
                _settle(work, _error_of(execute, args))
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
        self._queue.put((work, execute, args))

    def run(self, work: Work, execute: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Execute ``execute(*args)`` now, behind what is queued, and complete ``work``; what it raises is in ``work`` alone."""
        if self.try_enter():
            try:
                _settle(work, _error_of(execute, args))
            finally:
                self.door.release()
            return
        self.submit(work, execute, args)
        work.future.wait_quietly()

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

    def _execute(self, work: Work, execute: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with self.door:
            error = _error_of(execute, args)
            if work.future.has_callbacks():
                # Callbacks may issue more collectives: those belong before whatever other threads
                # issue next.
                try:
                    _settle(work, error)
                finally:
                    self._count_down()
                return
        # Nobody listens yet: free the order first, so that the thread this wakes can go on without
        # queueing.
        self._count_down()
        _settle(work, error)

    def _count_down(self) -> None:
        with self._count_lock:
            self.pending -= 1


def _error_of(execute: Callable[..., Any], args: tuple[Any, ...]) -> BaseException | None:
    try:
        execute(*args)
    except Exception as error:
        return error
    return None


def _settle(work: Work, error: BaseException | None) -> None:
    if error is not None:
        work.future.set_exception(error)
    else:
        work.future.set_result(work.tensors)
