"""Queue and thread of a group, which keep its collectives in one order.

A group has one communicator, between nodes a second one for the data of broadcasts, and MPI matches
collectives by the order in which each rank calls them. Asynchronous operations go through the queue
of the group to its thread. A synchronous one is executed by the calling thread if the queue is
empty, and else waits behind the queue; so a synchronous call on one rank matches an asynchronous
one on another. An operation issued by the group's own thread (by a future's callback) is executed
at once, ahead of the queue: the operation with the callback has ended, and the callbacks of all
ranks have the same place in the order.

A thread that waits for a queued operation executes the queue up to it, unless the group's thread
does so already or a callback is due, which the group's thread alone runs. Waking the group's thread
takes longer than a short collective, so after a run of operations that were all executed in this
way the thread is not woken: it looks at the queue every millisecond by itself, until it has to
execute an operation or none has come for a while.

In a thread within ``at_once``, every operation has ended when the call that issues it returns,
asynchronous or not.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from mpidist.comm.mpi import backoff, runtime
from mpidist.errors import GroupError
from mpidist.weak_registry import WeakRegistry

Execute: TypeAlias = Callable[[], Any]

# So many operations in a row executed by waiting threads, and the group's thread looks by itself.
_HELPED = 16
_LOOK_S = 1e-3
# It sleeps until it is woken once no operation has been executed so long.
_LINGER_S = 0.1
# Of open and closed groups.
_all: WeakRegistry[Progress] = WeakRegistry()


class _Here(threading.local):
    """What each thread knows of itself.

    Attributes:
        is_at_once: The thread is within ``at_once``.
    """

    is_at_once = False


# Read without a call where a prepared operation is queued.
here = _Here()


@contextmanager
def at_once() -> Iterator[None]:
    """End each operation that this thread issues in the block before the call returns."""
    before = here.is_at_once
    here.is_at_once = True
    try:
        yield
    finally:
        here.is_at_once = before


def is_at_once() -> bool:
    """Return whether this thread is within ``at_once``."""
    return here.is_at_once


class Completion(Protocol):
    """End of a queued operation: a ``Future`` or a ``Work``."""

    def done(self) -> bool:
        """Return whether it is complete."""

    def has_callbacks(self) -> bool:
        """Return whether completing would run callbacks."""

    def set_result(self, value: Any) -> None:
        """Complete with what the operation has returned."""

    def set_exception(self, exception: BaseException) -> None:
        """Complete with the operation's error."""

    def wait_quietly(self) -> None:
        """Wait until complete and raise nothing."""


class Progress:
    """Queue and thread of one group.

    Attributes:
        items: Queued operations that no thread executes yet; popped under ``lock``.
        popped: The one that is executed, None between two; changed under ``lock``.
        left: Called with an interrupt that has left the execution of an operation by a thread that
            waits for it; returns the error of the operation.
        lock: Held while a collective is executed. Re-entrant, because callbacks in the group's
            thread issue collectives.
    """

    def __init__(self, name: str) -> None:
        self.items: deque[tuple[Completion, Execute]] = deque()
        self.popped: tuple[Completion, Execute] | None = None
        self.left: Callable[[BaseException], BaseException] = _as_it_is
        self._running = 0  # popped operations that have not ended; changed under ``lock``
        self._name = name
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False ends the thread
        self._helped = 0  # operations that waiting threads have executed in a row
        self._helped_at = 0.0
        self._looks = False  # the thread looks at the queue by itself
        # The thread that executes an operation, and its acquisitions of the lock.
        self._executing_id: int | None = None
        self._depth = 0
        self._is_helped = False  # a thread that waits executes the queue
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None
        self._closed = False
        self.lock = threading.RLock()
        runtime.close_at_exit(self)
        _all.add(self)

    @property
    def pending(self) -> int:
        """Return the number of queued operations that have not ended."""
        return len(self.items) + self._running

    def is_own_thread(self) -> bool:
        """Return whether this is the group's thread."""
        return self._thread_id == threading.get_ident()

    def try_enter(self) -> bool:
        """Acquire the lock for a synchronous call, unless it must wait behind other operations.

        The group's own thread, and a thread that executes an operation, always acquire it; the
        former may block until a synchronous call of another thread has ended. The caller calls
        ``leave``.
        """
        own_id = threading.get_ident()
        if own_id == self._thread_id or own_id == self._executing_id:
            self.lock.acquire()
        elif self.items or not self.lock.acquire(blocking=False):
            return False
        self._depth += 1
        self._executing_id = own_id
        return True

    def leave(self) -> None:
        """Release the lock after ``try_enter``."""
        self._depth -= 1
        if not self._depth:
            self._executing_id = None
        self.lock.release()

    def submit(self, completion: Completion, execute: Execute) -> None:
        """Queue ``execute``, and complete with its result or its error.

        In the group's own thread, ``execute`` has ended when this returns.
        """
        if self._closed:
            raise GroupError(f'group "{self._name}" is closed')
        if self._thread_id == threading.get_ident():
            with self.lock:
                _complete(completion, execute)
            return
        if self._thread is None:
            self._start()
        # In this order: the thread looks for items after it has decided to sleep until it is woken.
        self.items.append((completion, execute))
        if self._wakes_thread():
            self._wakes.put(True)

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=runtime.guard_thread(self._run),
                    name=f"mpidist-{self._name}",
                    daemon=True,
                )
                thread.start()
                self._thread = thread

    def help(self, completion: Completion) -> None:
        """Execute what is queued up to ``completion`` in this thread, which waits for it.

        Returns early where the group's thread executes, or is to run a callback.
        """
        own_id = threading.get_ident()
        if self._thread_id == own_id:
            return
        items, acquire, is_done = self.items, self.lock.acquire, False
        self._is_helped = True
        try:
            while not is_done and acquire(False):
                self._depth += 1
                self._executing_id = own_id
                try:
                    first = items[0][0] if items else None
                    # Most waits are for the next operation.
                    if first is not completion and completion.done():
                        is_done = True
                        break
                    if first is None or first.has_callbacks():
                        break
                    self._help_with_next()
                finally:
                    self.leave()
                is_done = first is completion or completion.done()
        finally:
            self._is_helped = False
            if not is_done or (items and self._wakes_thread()):
                self._wakes.put(True)

    def _help_with_next(self) -> None:
        self._running += 1
        completion, execute = self.items[0]
        try:
            self.popped = self.items.popleft()
            result, error = _outcome(execute)
        except BaseException as interrupt:  # an interrupt of this thread
            self._running -= 1
            completion.set_exception(self.left(interrupt))
            raise
        finally:
            self.popped = None
        self._helped += 1
        self._helped_at = time.monotonic()
        self._running -= 1
        _set(completion, result, error)

    def _wakes_thread(self) -> bool:
        return not self._looks or self._helped < _HELPED

    def run(self, completion: Completion, execute: Execute) -> None:
        """Execute behind the queue, and wait until complete; raise nothing."""
        if self.try_enter():
            try:
                _complete(completion, execute)
            finally:
                self.leave()
            return
        self.submit(completion, execute)
        completion.wait_quietly()

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
        self._wakes.put(False)
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
            self._wakes.put(False)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        goes_on = True
        seen: object = None
        first: object = None
        while goes_on:
            try:
                goes_on = self._wakes.get(timeout=self._pause_s())
            except queue.Empty:
                # A thread may be about to wait for the first item, unless it is here since the last
                # look.
                first = self._first()
                if self._looks and first is not seen:
                    seen = first
                    continue
            # The sleep keeps no operation, and so no tensors, alive.
            seen = first = None
            # A thread that helps wakes this one if it leaves something.
            while self.items and not self._is_helped:
                self._execute_next()

    def _first(self) -> object:
        try:
            return self.items[0]
        except IndexError:
            return None

    def _pause_s(self) -> float | None:
        """Return how long the thread may sleep unless it is woken; None for no limit."""
        # Before the look for items: an item that comes after it finds whether it must wake.
        self._looks = self._helped >= _HELPED and time.monotonic() - self._helped_at < _LINGER_S
        if self._looks:
            return _LOOK_S
        # What was queued while the thread looked by itself came without a wake-up.
        return 0.0 if self.items else None

    def _execute_next(self) -> None:
        with self.lock:
            if not self.items:
                return  # a waiting thread has executed it
            self._running += 1
            completion, execute = self.popped = self.items.popleft()
            self._helped = 0
            outcome = _outcome(execute)
            self.popped = None
            if completion.has_callbacks():
                # Callbacks may issue collectives, which precede those of other threads.
                try:
                    _set(completion, *outcome)
                finally:
                    self._running -= 1
                return
            # Counted down first, so that the thread that waits can issue its next operation
            # directly.
            self._running -= 1
        _set(completion, *outcome)


def _as_it_is(error: BaseException) -> BaseException:
    return error


def _complete(completion: Completion, execute: Execute) -> None:
    _set(completion, *_outcome(execute))


def _outcome(execute: Execute) -> tuple[Any, BaseException | None]:
    try:
        return execute(), None
    except Exception as error:
        return None, error


def _set(completion: Completion, result: Any, error: BaseException | None) -> None:
    if error is not None:
        completion.set_exception(error)
    else:
        completion.set_result(result)


def _settle(timeout_s: float | None) -> None:
    # A callback in one group's thread may issue an operation of another group.
    backoff.until(
        lambda: not any(one.pending for one in _all.alive()),
        timeout_s=timeout_s,
        longest_s=1e-3,
    )


runtime.belongs_to_world(lambda: None, settle=_settle)
