"""Calls that threads wait for, and the futures of ``rpc_async`` and ``remote``.

The owner's answer to a call of ``remote`` carries no value.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mpidist import torch_futures
from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import CommTimeout, MpidistError
from mpidist.rpc.message import Kind
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.pool import CALLBACKS, Action

_RawFuture = torch._C.Future
# Reentrant: a signal's handler or a finalizer may wait within any call.
_parking = threading.RLock()
_EXCEPTION = int(Kind.EXCEPTION)
T = TypeVar("T")


class Call:
    """A request that has no answer yet; its caller waits in ``rpc_sync``.

    Attributes:
        sequence: Its number on this worker.
        to: The callee's rank.
        what: The call in messages to users: a text, or the wire name of ``function``.
        function: The function that is called; None for other requests.
        deadline: The time at which it fails (``time.monotonic``); infinite for no timeout.
        incoming: The answer, not decoded.
        error: Why the call has failed without an answer.
        entry: Number of its entry in the recorder.
        done: An answer or an error is there; for a call with a future, the future is complete.
        latches: One for each thread that sleeps until the call is done.
        leads: Its thread may poll for the answer (``polling``).
    """

    __slots__ = (
        "deadline",
        "done",
        "entry",
        "error",
        "function",
        "incoming",
        "latches",
        "leads",
        "sequence",
        "timeout_s",
        "to",
        "what",
    )

    is_creation = False
    lane = CALLBACKS
    may_block = False

    def __init__(
        self, to: int, what: str | bytes, timeout_s: float, function: object = None
    ) -> None:
        self.sequence = -1
        self.entry = 0
        self.to = to
        # Not one tuple: the garbage collector scans every container of an outstanding call.
        self.what = what
        self.function = function
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
        self.incoming: Any = None  # Incoming
        self.error: BaseException | None = None
        self.done = False
        self.latches: tuple[threading.Lock, ...] = ()
        self.leads = False

    def finish(self) -> None:
        """Mark the call as done, and wake the threads that wait for it."""
        self.done = True
        if self.latches:
            self.wake()

    def wake(self) -> None:
        """Wake the threads that sleep in ``park``."""
        for latch in self.latches:
            try:
                latch.release()
            except RuntimeError:  # released by another thread
                pass

    def complete(self, incoming: Incoming) -> Action | None:
        """Store the answer, on the polling thread; return the action that remains, or None."""
        self.incoming = incoming
        self.finish()
        return None

    def fail(self, error: BaseException) -> Action | None:
        """Store an error in place of an answer; return the action that remains, or None."""
        self.error = error
        self.finish()
        return None

    def park(self, timeout_s: float, may_sleep: Callable[[], bool] | None = None) -> None:
        """Sleep until the call is done or ``wake`` is called. Several threads may sleep.

        Blocks: at most ``timeout_s`` seconds.

        Args:
            timeout_s: Seconds.
            may_sleep: Called when ``wake`` already reaches this thread; the thread does not sleep
                if it returns False.
        """
        latch = threading.Lock()
        latch.acquire()
        with _parking:
            self.latches = (*self.latches, latch)
        if not self.done and (may_sleep is None or may_sleep()):
            latch.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        with _parking:
            self.latches = tuple(other for other in self.latches if other is not latch)

    def timed_out(self, text: str) -> CommTimeout:
        """Return the error for a call without an answer in time; ``text`` names the call."""
        return CommTimeout(
            f"RPC ran for more than set timeout ({self.timeout_s * 1e3:.0f} ms) and will now be "
            f"marked with an error: {text}; pass timeout= (0 for none), or set rpc_timeout of the "
            "options"
        )


class AsyncCall(Call):
    """A call with a future. As an action it completes the future, and so runs users' callbacks.

    Also callbacks that are not known here: those behind a future of C++ (``collect_all``).

    Args:
        to: See ``Call``.
        what: See ``Call``.
        timeout_s: For the answer; 0 for none.
        result_of: Decodes the answer.
        on_end: Called with the call behind the callbacks.
        function: See ``Call``.
    """

    __slots__ = ("_on_end", "_result_of", "future")

    def __init__(
        self,
        to: int,
        what: str | bytes,
        timeout_s: float,
        result_of: Callable[[Call], object],
        on_end: Callable[[Call], object],
        function: object = None,
    ) -> None:
        super().__init__(to, what, timeout_s, function)
        self.future: RpcFuture | None = None
        self._result_of = result_of
        self._on_end = on_end

    @property
    def may_block(self) -> bool:  # type: ignore[override]
        """Return whether completing the future runs callbacks that are known to be users'."""
        future = self.future
        return future is not None and future.has_callbacks

    def complete(self, incoming: Incoming) -> Action | None:
        """See ``Call``."""
        self.incoming = incoming
        return self

    def fail(self, error: BaseException) -> Action | None:
        """See ``Call``."""
        self.error = error
        return self

    def run(self) -> None:
        """Complete the future, unless another thread does."""
        # Call and future drop each other, so that neither waits for the garbage collector.
        future, self.future = self.future, None
        if future is not None:
            try:
                self._complete_future(future)
            finally:
                self._on_end(self)

    def _complete_future(self, future: RpcFuture) -> None:
        try:
            result = self._result_of(self)
        except BaseException as error:
            self.error = error
            self.incoming = None
            self.done = True
            # torch's future accepts no other exceptions, and an answer must not end this program.
            is_error = isinstance(error, Exception)
            torch_futures.set_exception(
                future,
                error if is_error else MpidistError(f"reading the answer raised {error!r}"),
            )
        else:
            self.incoming = None
            self.done = True
            torch_futures.set_result(future, result)
        future.call = None
        self.finish()


class RpcFuture(torch.futures.Future):
    """A ``torch.futures.Future`` whose waiting thread has the answer polled for.

    Attributes:
        call: None once the future is complete.
        has_callbacks: Completing it runs users' code.
    """

    def __init__(
        self, wait_for: Callable[[Call], None], call: AsyncCall, devices: list[torch.device]
    ) -> None:
        _RawFuture.__init__(self, devices)
        self.has_callbacks = False
        self.call: AsyncCall | None = call
        self._wait_for = wait_for
        call.future = self

    def wait(self) -> Any:
        """Return the call's result, or raise what it raised.

        Blocks: until the answer is there, at most the call's timeout.
        """
        # call.done would be too late: in a callback the future is complete and the call is not.
        call = self.call
        if call is not None and not self.done():
            self._wait_for(call)
        return super().wait()

    def observe(self, callback: Callable[[torch.futures.Future], None]) -> None:
        """Add a callback of this library: not users' code, it runs where the future completes."""
        super().add_done_callback(callback)

    def then(self, callback: Callable[[torch.futures.Future], T]) -> torch.futures.Future[T]:
        """See ``torch.futures.Future.then``. The callback may block.

        It runs in the autograd context of the thread that has called ``then``.
        """
        self.has_callbacks = True
        return super().then(interceptor.in_current_context(callback))

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:
        """See ``torch.futures.Future.add_done_callback``; the callback runs as for ``then``."""
        self.has_callbacks = True
        super().add_done_callback(interceptor.in_current_context(callback))

    def set_result(self, result: object) -> None:
        """See ``torch.futures.Future.set_result``; the answer, once it comes, is dropped."""
        super().set_result(result)
        self._end_waits()

    def set_exception(self, result: object) -> None:
        """See ``torch.futures.Future.set_exception``; the answer is dropped."""
        super().set_exception(result)
        self._end_waits()

    def _end_waits(self) -> None:
        call = self.call
        if call is not None:
            call.finish()


# Guards the choice of the thread that completes a creation's future, and of the error it is given.
_completing = threading.RLock()


class Creation(Call):
    """A call of ``remote``. Its answer reports whether the owner has made the value.

    Args:
        to: The owner's rank.
        what: See ``Call``.
        timeout_s: For the answer; 0 for none.
        error_of: Decodes the exception in an answer.
        on_answer: Called once, on the polling thread, when the answer or an error is there.
        on_end: Called with the call behind the future's callbacks, or without a future behind
            ``on_answer``.
        function: See ``Call``.
    """

    __slots__ = ("_error_of", "_future", "_on_answer", "_on_end", "_open_future")

    def __init__(
        self,
        to: int,
        what: str | bytes,
        timeout_s: float,
        error_of: Callable[[Call], BaseException],
        on_answer: Callable[[], None] | None,
        on_end: Callable[[Call], object],
        function: object = None,
    ) -> None:
        super().__init__(to, what, timeout_s, function)
        self._error_of = error_of
        self._on_answer = on_answer
        self._on_end = on_end
        self._future: torch.futures.Future | None = None
        # The same future until a thread completes it, then None.
        self._open_future: torch.futures.Future | None = None

    may_block = True
    is_creation = True

    @property
    def is_lost(self) -> bool:
        """Return whether the owner has not answered in time: the value may or may not exist."""
        return isinstance(self.error, CommTimeout)

    def complete(self, incoming: Incoming) -> Action | None:
        """See ``Call``."""
        if incoming.kind == _EXCEPTION:
            self.incoming = incoming
        return self._end()

    def confirm(self) -> bool:
        """Complete the call if no action follows from that; return whether none does.

        Interruptible at each step: ``complete`` does the same afterwards.
        """
        if self._on_answer is not None or self._future is not None:
            return False
        self.finish()
        # A future that was made meanwhile is left to the action of ``complete``.
        if is_over := self._future is None:
            self._on_end(self)
        return is_over

    def fail(self, error: BaseException) -> Action | None:
        """See ``Call``."""
        self.error = error
        return self._end()

    def _end(self) -> Action | None:
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer()
        self.finish()
        if self._future is not None:
            return self
        self._on_end(self)
        return None

    def reason(self) -> BaseException | None:
        """Return why the creation has failed, once it is done; None if the value exists."""
        # Without a lock: decoding runs users' code. Two threads may decode, and one error is kept.
        if self.incoming is not None and self.error is None:
            try:
                error = self._error_of(self)
            except Exception as failure:
                # An unreadable answer must not end this thread, which serves all calls.
                error = failure
            with _completing:
                self.error = self.error or error
                self.incoming = None
        return self.error

    def future(self) -> torch.futures.Future:
        """Return a future that completes when the owner has answered, with None or its error."""
        with _completing:
            is_new = self._future is None
            if self._future is None:
                self._open_future = self._future = torch.futures.Future()
        # A future that others may have callbacks on is completed by an action, or where it is made.
        if is_new and self.done:
            self._complete_future()
        return self._future

    def run(self) -> None:
        """Complete the future, unless another thread does."""
        self._complete_future()
        self._on_end(self)

    def _complete_future(self) -> None:
        with _completing:
            future, self._open_future = self._open_future, None
        if future is None:
            return
        error = self.reason()
        if error is None:
            torch_futures.set_result(future, None)
        else:
            torch_futures.set_exception(future, error)


def wait_for_all(futures: Sequence[RpcFuture], wait: Callable[[Call], None]) -> None:
    """Wait until calls are done; raise the first error without waiting for the other calls.

    Args:
        futures: Of the calls.
        wait: Waits for one call, as ``Polling.wait``.
    """
    failed: list[torch.futures.Future] = []
    waiting = set(map(id, futures))
    latch = Call(-1, "all calls", 0.0)

    def record_outcome(future: torch.futures.Future) -> None:
        try:
            future.value()
        except Exception:
            failed.append(future)
        waiting.discard(id(future))
        if failed or not waiting:
            latch.finish()

    for future in futures:
        future.observe(record_outcome)
    if futures:
        wait(latch)
    for first in failed:
        first.wait()
