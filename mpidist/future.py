"""Future with the names of ``torch.futures.Future`` and without a dependency on torch.

It differs from torch's in two ways: ``wait`` takes a timeout, and an exception in a callback is not
lost: the future that ``then`` returned raises it, or it is printed with its traceback. What a
signal handler raises in a callback, or ``sys.exit``, leaves the call of the main thread that runs
the callbacks, behind the last of them.

A value on a device may be set before the device has computed it. Such a future carries events of
the device's streams; the thread that reads the value makes its own stream wait for them.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout


class Event(Protocol):
    """Point in the work of a device's stream."""

    def block_current_stream(self) -> None:
        """Make the calling thread's stream wait for the event."""


T = TypeVar("T")
S = TypeVar("S")

# Guards the race between adding a callback and completing; held for a few instructions only.
_callbacks_lock = threading.Lock()


@untraced
class Future(Generic[T]):
    """A result that one thread sets once and any number of threads wait for.

    Args:
        events: The value is computed behind them; filled before the future is completed.
        fence: Returns an event behind all work that the calling thread has queued; called after
            each callback of ``then``.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_done",
        "_events",
        "_exception",
        "_fence",
        "_help",
        "_latch",
        "_seen",
        "_value",
    )

    def __init__(
        self, events: Sequence[Event] | None = None, fence: Callable[[], Event] | None = None
    ) -> None:
        self._events = events
        self._fence = fence
        self._help: Callable[[Any], object] | None = None
        self._done = False
        self._value: Any = None
        self._exception: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], object]] | None = None
        self._seen = False
        # A held lock is the cheapest latch: completing releases it, and each waiter acquires and
        # releases it. Made by the first thread that must wait: most futures are complete before.
        self._latch: threading.Lock | None = None

    def done(self) -> bool:
        """Return whether a result or an exception is set."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the value, or raise the exception that was set.

        Blocks: until the future is complete, at most ``timeout_s`` seconds (``None``: without end).

        Raises:
            CommTimeout: Not complete in time; the future itself is unchanged.
        """
        if self._help is not None and timeout_s is None and not self._done:
            self._help(self)
        if not self._done and not self.sleep(-1 if timeout_s is None else max(timeout_s, 0.0)):
            raise CommTimeout(f"no result after {timeout_s:g} s")
        return self.value()

    def value(self) -> T:
        """Return the value of a complete future, or raise its exception."""
        if not self._done:
            raise RuntimeError("the future is not complete; call wait() first")
        if self._exception is not None:
            self._seen = True
            raise self._exception
        for event in self._events or ():
            event.block_current_stream()
        return self._value

    def exception(self) -> BaseException | None:
        """Return the exception of a complete future, else None."""
        self._seen = True
        return self._exception

    def wait_quietly(self) -> None:
        """Wait until complete and raise nothing; ``wait`` still raises the exception."""
        if self._help is not None and not self._done:
            self._help(self)
        if not self._done:
            self.sleep(-1)

    def sleep(self, timeout_s: float) -> bool:
        """Wait until complete, at most ``timeout_s`` seconds unless it is -1; return whether it is.

        The threads that wait wake each other up.
        """
        with _callbacks_lock:
            if self._done:
                return True
            if self._latch is None:
                self._latch = threading.Lock()
                self._latch.acquire()
            latch = self._latch
        if not latch.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            return False
        latch.release()
        return True

    def set_result(self, value: T) -> None:
        """Complete with a value and run the callbacks in this thread."""
        run = self.end(value, None)
        if run is not None:
            run()

    def set_exception(self, exception: BaseException) -> None:
        """Complete with an exception and run the callbacks in this thread."""
        run = self.end(None, exception)
        if run is not None:
            run()

    def end(self, value: Any, error: BaseException | None) -> Callable[[], None] | None:
        """Complete without the callbacks.

        Returns:
            Runs those that were added before; None if there are none. Later ones run at once, in
            the thread that adds them.
        """
        with _callbacks_lock:
            if self._done:
                raise RuntimeError("the future is complete already")
            self._value, self._exception = value, error
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
            if self._latch is not None:
                self._latch.release()
        return None if callbacks is None else partial(_call_all, callbacks, self)

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` on completion, in the completing thread, or now if complete."""
        with _callbacks_lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        _call_all((callback,), self)

    def ends(self, waited: object) -> bool:
        """Return whether a thread that waits for ``waited`` waits for this future."""
        return waited is self

    def helped_by(self, help: Callable[[Any], object]) -> None:
        """Have a thread that waits without a limit call ``help(self)`` first.

        The function may complete the future in that thread.
        """
        self._help = help

    def has_callbacks(self) -> bool:
        """Return whether completing would run callbacks."""
        return self._callbacks is not None

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future of ``callback(self)``, which runs when this one is complete."""
        events: list[Event] = []
        made: list[Future[S]] = [Future(events, self._fence)]
        result = made[0]
        result._help = self._help

        def run(parent: Future[T]) -> None:
            # Popped, because the frames in an exception's traceback would keep alive the future
            # that holds the exception.
            try:
                value = callback(parent)
            except BaseException as error:
                made.pop().set_exception(error)
                if _is_interrupt(error):
                    raise
            else:
                if self._fence is not None:
                    events.append(self._fence())
                made.pop().set_result(value)

        self.add_done_callback(run)
        return result

    def __del__(self) -> None:
        # A failure that no thread has retrieved must be printed.
        if (
            getattr(self, "_exception", None) is not None
            and not self._seen
            and not sys.is_finalizing()
        ):
            # The first line only: a watchdog's report has one line for each rank, and has been
            # printed.
            first, *more = repr(self._exception).split("\\n")
            sys.stderr.write(
                f"mpidist: an exception was never retrieved: {first}{' ...' if more else ''}\n"
            )


def completed(value: T) -> Future[T]:
    """Return a complete future of ``value``."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _call_all(callbacks: Sequence[Callable[[Future[T]], object]], future: Future[T]) -> None:
    interrupt: BaseException | None = None
    for callback in callbacks:
        try:
            callback(future)
        except BaseException as error:
            # The completing thread must go on to other callbacks, and none must lose an exception.
            if _is_interrupt(error):
                interrupt = interrupt or error
                continue
            sys.stderr.write(f"mpidist: a future's callback {callback!r} raised\n")
            traceback.print_exception(type(error), error, error.__traceback__)
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt


def _is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is the main thread's, and not one that ends a computation."""
    return (
        not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
    )
