"""Queue and thread of a group, which keep its collectives in one order.

A group has one communicator, between nodes a second one for the data of broadcasts, and MPI matches
collectives by the order in which each rank calls them. Asynchronous operations go through the queue
of the group to its thread. A synchronous one is executed by the calling thread if the queue is
empty, and else waits behind the queue; so a synchronous call on one rank matches an asynchronous
one on another. An operation issued by the group's own thread (by a future's callback) is executed
at once, ahead of the queue: the operation with the callback has ended, and the callbacks of all
ranks have the same place in the order.

A thread that waits executes the operation that it waits for if that is the first of the queue, and
no other. Waking the group's thread takes longer than a short collective, so after a run of
operations that were all executed in this way the thread is not woken: it looks at the queue every
millisecond by itself, until it has to execute an operation or none has come for a while.

An operation ends, and its callbacks are taken, while the lock is held. The group's thread alone
runs them, before the next operation; a callback that is added later runs at once, in the thread
that adds it. Where callbacks wait for each other's groups, in a circle, each of these groups goes
on with its queue meanwhile.

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
from typing import Any, NoReturn, Protocol, TypeAlias

from mpidist.comm.mpi import backoff, runtime
from mpidist.errors import GroupError
from mpidist.weak_registry import WeakRegistry

Execute: TypeAlias = Callable[[], Any]

# So many operations in a row executed by waiting threads, and the group's thread looks by itself.
_HELPED = 16
_LOOK_S = 1e-3
# It sleeps until it is woken once no operation has been executed so long.
_LINGER_S = 0.1
# A callback that waits looks so often whether other groups' callbacks wait for its group.
_CIRCLE_S = 2e-3
# Of open and closed groups.
_all: WeakRegistry[Progress] = WeakRegistry()


class _Here(threading.local):
    """What each thread knows of itself.

    Attributes:
        is_at_once: The thread is within ``at_once``.
        progress: The group whose thread this is; None in other threads.
    """

    is_at_once = False
    progress: Progress | None = None


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

    def ends(self, waited: Any) -> bool:
        """Return whether a thread that waits for ``waited`` waits for this operation."""

    def has_callbacks(self) -> bool:
        """Return whether completing would run callbacks."""

    def end(self, value: Any, error: BaseException | None) -> Callable[[], None] | None:
        """Complete with what the operation has returned, or with its error.

        Returns:
            Runs the callbacks that were added before; None if there are none.
        """

    def sleep(self, timeout_s: float) -> bool:
        """Wait until complete, at most ``timeout_s`` seconds; return whether it is."""

    def wait_quietly(self) -> None:
        """Wait until complete and raise nothing."""


class Progress:
    """Queue and thread of one group.

    Attributes:
        items: Queued operations that no thread executes yet; popped under ``lock``. First may stand
            callbacks of an ended one, without a completion, which another thread has executed.
        popped: The one that is executed, None between two; changed under ``lock``.
        left: Called with an interrupt that has left the execution of an operation by a thread that
            waits for it; returns the error of the operation.
        lock: Held while a collective is executed, and by the group's thread while it runs
            callbacks. Re-entrant, because these issue collectives.
    """

    def __init__(self, name: str) -> None:
        self.items: deque[tuple[Completion | None, Execute]] = deque()
        self.popped: tuple[Completion | None, Execute] | None = None
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
        # The group for whose operation the group's thread waits: by a callback, or by a function
        # of ``in_order``.
        self._awaits: Progress | None = None
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

    def is_idle(self) -> bool:
        """Return whether no operation and no callback is queued or under way."""
        if self.pending or not self.lock.acquire(blocking=False):
            return False
        self.lock.release()
        return not self.pending

    def try_enter(self) -> bool:
        """Acquire the lock for a synchronous call, unless it must wait behind other operations.

        The group's own thread, and a thread that executes an operation, always acquire it; the
        former may block until a synchronous call of another thread has ended. The caller calls
        ``leave``.
        """
        own_id = threading.get_ident()
        if own_id == self._thread_id or own_id == self._executing_id:
            self.lock.acquire()
        elif not self.lock.acquire(blocking=False):
            return False
        elif self.items:
            # Looked up under the lock: what ends meanwhile leaves its callbacks here.
            self.lock.release()
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

        Raises:
            GroupError: The group is closed.
        """
        if self._thread_id == threading.get_ident():
            with self.lock:
                _complete(completion, execute)
            return
        if self._thread is None:
            self._start()
        # In this order: the thread looks for items after it has decided to sleep until it is woken,
        # and ends once it finds none after it was closed.
        item = (completion, execute)
        self.items.append(item)
        if self._closed:
            self._withdraw(item)
        if self._wakes_thread():
            self._wakes.put(True)

    def _start(self) -> None:
        with self._start_lock:
            if self._closed:
                self._refuse()
            if self._thread is None:
                thread = threading.Thread(
                    target=runtime.guard_thread(self._run),
                    name=f"mpidist-{self._name}",
                    daemon=True,
                )
                thread.start()
                self._thread = thread

    def _withdraw(self, item: tuple[Completion, Execute]) -> None:
        try:
            self.items.remove(item)
        except ValueError:
            return  # the thread executes it before it ends
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise GroupError(f'group "{self._name}" is closed')

    def help(self, completion: Completion) -> None:
        """Execute the operation that this thread waits for, if it is the first of the queue.

        Else the group's thread executes it. In the thread of a group see ``attend``.
        """
        if here.progress is not None:
            self.attend(completion)
            return
        is_left = True
        if self.lock.acquire(False):
            self._depth += 1
            self._executing_id = threading.get_ident()
            try:
                first = self.items[0][0] if self.items else None
                if first is not None and first.ends(completion):
                    is_left = self._help_with_next()
            finally:
                self.leave()
        if is_left:
            self._wakes.put(True)

    def _help_with_next(self) -> bool:
        """Execute the first operation; return whether its callbacks are left to the thread."""
        self._running += 1
        completion, execute = self.items[0]
        assert completion is not None
        try:
            self.popped = self.items.popleft()
            outcome = _outcome(execute)
        except BaseException as interrupt:  # an interrupt of this thread
            if self._end(completion, None, self.left(interrupt)):
                self._wakes.put(True)
            raise
        self._helped += 1
        self._helped_at = time.monotonic()
        return self._end(completion, *outcome)

    def _end(self, completion: Completion, result: Any, error: BaseException | None) -> bool:
        """Complete an operation, under the lock; put its callbacks first. Return whether any is."""
        self.popped = None
        # Counted down first: a thread that waits may ask whether an operation is pending.
        self._running -= 1
        run = completion.end(result, error)
        if run is not None:
            self.items.appendleft((None, run))
        return run is not None

    def attend(self, completion: Completion) -> None:
        """Wait until complete in the thread of a group, this one or another; else do nothing."""
        own = here.progress
        if own is not None:
            own._wait_within(self, completion)

    def _wait_within(self, other: Progress, completion: Completion) -> None:
        """Wait in the group's thread, within an operation or a callback, for another's operation.

        Where the callbacks of that group wait for this one, its operations go on meanwhile.
        """
        before, self._awaits = self._awaits, other
        try:
            while not completion.sleep(_CIRCLE_S):
                # Within an operation its own end comes first.
                if not here.is_at_once and self._is_in_circle():
                    self._execute_next()
        finally:
            self._awaits = before

    def _is_in_circle(self) -> bool:
        seen: list[Progress] = []
        other = self._awaits
        while other is not None and other not in seen:
            if other is self:
                return True
            seen.append(other)
            other = other._awaits
        return False

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

        Any number of threads may call it; each returns when the queue is empty. In the group's
        thread (a callback's call) the queue has been executed when this returns.

        Blocks: at most ``timeout_s`` seconds.
        """
        with self._start_lock:
            self._closed = True
            thread = self._thread
        if thread is None:
            return
        self._wakes.put(False)
        if self.is_own_thread():
            while self.items and not here.is_at_once:
                self._execute_next()
            return
        # In a signal's handler within a call of this thread, behind which the other ends.
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return
        thread.join(timeout_s)
        # Else a synchronous call of another thread holds it up.
        if thread.is_alive() and self.pending:
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
        here.progress = self
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
            while self.items:
                self._execute_next()
        # A waiting thread may execute the last one meanwhile, and leaves its callbacks.
        while self._execute_next():
            pass

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

    def _execute_next(self) -> bool:
        """Execute the first of the queue, and the callbacks of its end; in the group's thread.

        Returns:
            False if the queue is empty, and no other thread executes an operation.
        """
        with self.lock:
            if not self.items:
                return False  # a waiting thread may have executed it
            self._running += 1
            self._helped = 0
            completion, execute = self.popped = self.items.popleft()
            if completion is None:
                self._run_callbacks(execute)
            elif self._end(completion, *_outcome(execute)):
                self._running += 1
                self._run_callbacks(self.items.popleft()[1])
        return True

    def _run_callbacks(self, run: Execute) -> None:
        # What they issue precedes the queue: the lock is held.
        self.popped = None
        try:
            run()
        finally:
            self._running -= 1


def _as_it_is(error: BaseException) -> BaseException:
    return error


def _complete(completion: Completion, execute: Execute) -> None:
    """Execute and complete what no other thread knows yet, so without callbacks."""
    completion.end(*_outcome(execute))


def _outcome(execute: Execute) -> tuple[Any, BaseException | None]:
    try:
        return execute(), None
    except Exception as error:
        return None, error


def _settle(timeout_s: float | None) -> None:
    # A callback in one group's thread may issue an operation of another group.
    backoff.until(
        lambda: all(one.is_idle() for one in _all.alive()),
        timeout_s=timeout_s,
        longest_s=1e-3,
    )


runtime.belongs_to_world(lambda: None, settle=_settle)
