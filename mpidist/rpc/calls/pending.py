"""Pending calls of one worker: requests from their start to their answer, timeout or failure."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import FrameError, MpidistError, RankFailureError
from mpidist.rpc.calls.call_entries import CallEntries
from mpidist.rpc.calls.reader import Reader
from mpidist.rpc.calls.wire import Wire
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.message import Kind
from mpidist.rpc.names import callee, services
from mpidist.rpc.options import seconds
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.call import AsyncCall, Call, Creation, RpcFuture
from mpidist.rpc.threads.polling import Polling
from mpidist.rpc.threads.pool import HANDLED, Action, here
from mpidist.rpc.values import codec, remote_error
from mpidist.rpc.values.codec import EMPTY, Args, Content, Kwargs
from mpidist.rpc.worker import Workers

_EXCEPTION = int(Kind.EXCEPTION)
_NEVER = float("inf")
# Of calls, unique in the process and not only for one agent: an entry of the recorder has the
# number, by which a trace over several ``init_rpc`` finds the handler of each call.
_numbers = itertools.count()

# Open calls from which on a thread that issues more lets others be answered first, and seconds
# without an answer after which it goes on.
_MANY = 512
_NO_ANSWER_S = 0.02  # longer than an idle worker sleeps between polls
_LOOK_S = 2e-4  # between two looks at the number of open calls


class PendingCalls:
    """Requests that have no answer yet. Thread-safe: the thread that removes a call completes it.

    Args:
        workers: All workers.
        wire: Sends the requests.
        reader: Decodes the answers.
        polling: Polls while a thread waits.
        rpc_timeout: Seconds for calls without a timeout of their own; 0 for no timeout.
        devices: The CUDA devices of futures.
        is_data_only: This worker has a list, and reads data only.
        drop: Releases the references in an answer that arrives too late.

    Attributes:
        rpc_timeout: As above; may be changed.
        started: The number of the last call; at first one that no call has.
        is_stopped: RPC has ended on this worker: calls are rejected.
        stop_reason: Why, for errors.
    """

    def __init__(
        self,
        workers: Workers,
        wire: Wire,
        reader: Reader,
        polling: Polling,
        rpc_timeout: float,
        devices: Sequence[torch.device],
        is_data_only: bool,
        drop: Callable[[Incoming], None],
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.started = next(_numbers)
        self.is_stopped = False
        self.stop_reason = "RPC was shut down"
        self._workers = workers
        self._reader = reader
        self._polling = polling
        self._devices = list(devices)
        self._is_data_only = is_data_only
        self._drop = drop
        self._wire = wire
        self._post = wire.post
        self._data_only = wire.data_only
        self._entries = CallEntries("call")
        self._begin, self._end = self._entries.begin, self._entries.end
        self._world_ranks = workers.world_ranks
        self._numbers = _numbers
        self._pending: dict[int, Call] = {}  # by number
        # Calls with a future, from before they are pending until behind its callbacks.
        self._futures: set[Call] = set()
        # One bound method each for all calls.
        self._end_future, self._error_of = self._futures.discard, self.error_of
        # The earliest deadline of the calls that were pending at the last search, or an earlier
        # time. A call that has an earlier one asks for another search.
        self._next_deadline = _NEVER
        self._is_searched = True
        self._searching = threading.Lock()
        self._pace_at = _MANY

    def __len__(self) -> int:
        return len(self._pending)

    def unfinished(self) -> int:
        """Return the number of calls without an answer, and of those whose callbacks still run.

        Not less than 1 from the start of a first call until the end of the last one's callbacks,
        if each starts the next; else not exact.
        """
        return len(self._pending) + len(self._futures)

    def creations(self) -> int:
        """Return the number of calls of ``remote`` that the owner has not answered."""
        return sum(call.is_creation for call in list(self._pending.values()))

    # Calls of functions.

    def invoke(self, to: int, function: object, args: Args, kwargs: Kwargs, timeout: float) -> Any:
        """Call a function on a worker and return its result.

        Blocks: until the answer is there, at most the timeout.
        """
        kind, name = callee.wire_name(function)
        content = codec.encode_function(function, name, args, kwargs, self._data_only[to])
        call = Call(
            to,
            name,
            self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else seconds(timeout),
            function,
        )
        self.start(call, kind, name, content)
        self._polling.wait(call)
        if not call.done:
            self.wait(call)
        return self._result_of(call)

    def invoke_async(
        self, to: int, function: object, args: Args, kwargs: Kwargs, timeout: float
    ) -> RpcFuture:
        """Call a function on a worker and return the future of its result."""
        kind, name = callee.wire_name(function)
        content = codec.encode_function(function, name, args, kwargs, self._data_only[to])
        timeout_s = self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else seconds(timeout)
        call = AsyncCall(to, name, timeout_s, self._result_of, self._end_future, function)
        future = RpcFuture(self.wait, call, self._devices)
        self.start(call, kind, name, content)
        self._polling.note_call()
        self.pace()
        return future

    def require_sendable(self, to: int, function: object, args: Args) -> None:
        """Raise what a call of a function would raise because of its arguments; send nothing.

        Raises:
            Exception: They cannot be encoded, or sent to this worker.
        """
        name = callee.wire_name(function)[1]
        content = codec.encode_function(function, name, args, {}, self._data_only[to])
        self._wire.require_sendable(to, content)

    def request(
        self, to: int, kind: int, prefix: bytes, obj: object, timeout: float, what: str
    ) -> Any:
        """Send a request other than a function call, and return its answer.

        Blocks: until the answer is there, at most the timeout.
        """
        content = codec.encode(obj, self._data_only[to]) if obj is not None else EMPTY
        call = Call(
            to, what, self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else seconds(timeout)
        )
        self.start(call, kind, prefix, content)
        return self.result(call)

    def creation(
        self,
        to: int,
        name: bytes,
        timeout_s: float,
        on_answer: Callable[[], None] | None,
        function: object,
    ) -> Creation:
        """Make a call of ``remote``; see ``Creation``."""
        return Creation(to, name, timeout_s, self._error_of, on_answer, self._end_future, function)

    def start(self, call: Call, kind: int, prefix: bytes, content: Content) -> None:
        """Register a call and send its request. The call fails if the worker has left.

        Raises:
            MpidistError: RPC was shut down.
            Exception: The request cannot be sent; the call is not registered.
        """
        to = call.to
        self.started = call.sequence = sequence = next(self._numbers)
        signature, peer = self._entries[call.what], self._world_ranks[to]
        call.entry = self._begin(signature, 0, 0, peer, sequence)
        try:
            if type(call) is not Call:
                self._futures.add(call)
            self._pending[sequence] = call
            if call.deadline < self._next_deadline:
                # Not stored here: another thread may store a later one at the same time.
                self._is_searched = False
            # Behind the registration: a thread that stops RPC, or finds that a worker has left,
            # records that first and fails the registered calls afterwards. So one of the two sees
            # the other.
            is_refused = self.is_stopped or to in self._workers.left
            if not is_refused:
                engine = interceptor.engine
                self._post(
                    to,
                    kind,
                    sequence,
                    0 if engine is None else engine.current_context(),
                    prefix,
                    content,
                )
        except BaseException:
            self._pending.pop(sequence, None)
            self._futures.discard(call)
            self._entries.fail(call.entry)
            raise
        if is_refused:
            self._refuse(call)

    def _refuse(self, call: Call) -> None:
        if self._pending.pop(call.sequence, None) is None:
            return  # another thread fails it
        if self.is_stopped:
            self._futures.discard(call)
            self._entries.fail(call.entry)
            raise MpidistError(f"{self.stop_reason}; {self._describe(call)} cannot be sent")
        self._fail(call, self._left_error(call))

    def pace(self) -> None:
        """Let others be answered first, after an asynchronous call of a user's thread.

        Does nothing in a handler, and while fewer than ``_MANY`` calls are open.

        Blocks: until few are open; 20 ms without an answer, after each ``_MANY`` calls more.
        """
        count = len(self._pending)
        if count < _MANY:
            self._pace_at = _MANY
        elif count >= self._pace_at and here.thread is None:
            self._await_answers()

    def _await_answers(self) -> None:
        # Open MPI's cost of a message grows with those that the receiver has not taken: 10 us
        # among 10,000, 100 us among 40,000.
        pending, clock = self._pending, time.monotonic
        left, since = len(pending), clock()
        while len(pending) > _MANY // 2 and not self.is_stopped:
            self._polling.summon()
            time.sleep(_LOOK_S)
            if len(pending) < left:
                left, since = len(pending), clock()
            elif clock() - since > _NO_ANSWER_S:
                break
        self._pace_at = len(pending) + _MANY

    # Waiting.

    def wait(self, call: Call) -> None:
        """Wait until a call is done; at its deadline it fails."""
        if not self.is_stopped:
            self._polling.wait(call)
        while not call.done:
            if call.deadline <= time.monotonic():
                self._time_out(call)
            if not call.done:
                if self.is_stopped and self._pending.pop(call.sequence, None) is not None:
                    text = f"{self.stop_reason} before {self._describe(call)} was answered"
                    self._fail(call, MpidistError(text))
                # Another thread has removed the call and completes it.
                call.park(0.01)

    def result(self, call: Call) -> Any:
        """Wait for a call without a future; return its result or raise its error."""
        if not call.done:
            self.wait(call)
        return self._result_of(call)

    def _result_of(self, call: Call) -> Any:
        if call.error is not None:
            raise call.error
        incoming = call.incoming
        if incoming.kind == _EXCEPTION:
            raise self.error_of(call)
        return self._reader.decode_answer(incoming)

    def error_of(self, call: Call) -> BaseException:
        """Return the exception that a call has raised on the other worker."""
        description = self._reader.decode_answer(call.incoming)
        workers = self._workers
        error = remote_error.rebuild(description, workers.infos[call.to], self._is_data_only)
        return remote_error.called_by(workers.me, error, workers.infos[call.to])

    # On the polling thread.

    def complete(self, incoming: Incoming) -> Action:
        """Complete the call that an answer belongs to; return the action that remains.

        Raises:
            FrameError: Another worker than the callee has sent it; the call stays pending.
        """
        call = self._pending.get(incoming.sequence)
        if call is not None:
            if call.to != incoming.source:
                raise FrameError(f"rank {incoming.source} has answered {self._describe(call)}")
            call = self._pending.pop(incoming.sequence, None)
        if call is None:  # timed out
            self._drop(incoming)
            return HANDLED
        if incoming.kind == _EXCEPTION:
            self._entries.fail(call.entry)
        else:
            self._end(call.entry)
        if type(call) is not Call:
            return call.complete(incoming) or HANDLED
        call.incoming = incoming
        call.done = True
        if call.latches:
            call.wake()
        return HANDLED

    def confirm(self, incoming: Incoming) -> bool:
        """Complete the call of ``remote`` that an answer without a value belongs to.

        Returns:
            False if users' code would follow: ``complete`` must take up the answer.
        """
        call = self._pending.get(incoming.sequence)
        if not isinstance(call, Creation) or call.to != incoming.source or not call.confirm():
            return False
        if self._pending.pop(incoming.sequence, None) is not None:
            self._end(call.entry)
        return True

    def fail_to(self, rank: int) -> None:
        """Fail the calls to a worker that has left."""
        for call in self._remove_where(lambda call: call.to == rank):
            self._fail(call, self._left_error(call))

    def stop(self) -> None:
        """Fail all calls, and reject new ones."""
        self.is_stopped = True
        # One after the other: a callback of one may wait for another, which that wait fails.
        for call in list(self._pending.values()):
            if self._pending.pop(call.sequence, None) is not None:
                text = f"{self._describe(call)}: {self.stop_reason} on this worker"
                self._fail(call, MpidistError(text))

    def fail(self, sequence: int, error: BaseException, source: int) -> None:
        """Fail a call by its number if it is pending and its callee is rank ``source``."""
        call = self._pending.get(sequence)
        if call is not None and call.to == source and self._pending.pop(sequence, None) is not None:
            self._fail(call, error)

    def has_expired(self) -> bool:
        """Return whether a deadline may have passed."""
        return not self._is_searched or (
            self._next_deadline != _NEVER and time.monotonic() >= self._next_deadline
        )

    def expire(self) -> None:
        """Fail the calls whose deadline has passed."""
        for call in self._search():
            self._time_out(call)

    def _search(self) -> list[Call]:
        """Return the calls whose deadline has passed, and store the earliest one of the others.

        Each pending call was seen by the last search, or compares its deadline with one that no
        earlier search has stored, and asks for another.
        """
        # Of two threads the second one goes on: it must not store an older search's result. Nor
        # may it wait: it may run within the first, in a signal's handler or a finalizer.
        if not self._searching.acquire(blocking=False):
            return []
        try:
            # In this order, and before the calls are read: those that come later ask again.
            self._is_searched = True
            self._next_deadline = _NEVER
            now, calls = time.monotonic(), list(self._pending.values())
            self._next_deadline = min(
                [call.deadline for call in calls if call.deadline > now], default=_NEVER
            )
            return [call for call in calls if call.deadline <= now]
        except BaseException:
            self._is_searched = False
            raise
        finally:
            self._searching.release()

    def _time_out(self, call: Call) -> None:
        """Fail a call whose deadline has passed, if it is pending."""
        if self._pending.pop(call.sequence, None) is not None:
            error = call.timed_out(self._describe(call))
            error.calls = self._broken(call, "timed out")
            self._fail(call, error)

    def _remove_where(self, concerns: Callable[[Call], bool]) -> list[Call]:
        """Remove and return the calls for which ``concerns`` returns True."""
        matching = [call for call in list(self._pending.values()) if concerns(call)]
        return [call for call in matching if self._pending.pop(call.sequence, None) is not None]

    def _fail(self, call: Call, error: BaseException) -> None:
        """Fail a call that was removed."""
        self._entries.fail(call.entry)
        self._run_action(call.fail(error))

    def _run_action(self, action: Action | None) -> None:
        if action is None:
            return
        if self.is_stopped:  # the pool ends
            action.run()
        else:
            self._polling.pool.submit(action)

    def _describe(self, call: Call) -> str:
        """Return the name of a call for messages to users."""
        what = call.what
        if isinstance(what, str):
            return what
        function = call.function
        if type(function) is FunctionType and function in services.titles:
            name = services.titles[function]
        else:
            named = callee.display_name(what) or getattr(function, "__qualname__", None)
            name = named or repr(function)
        text = f"remote {name}" if call.is_creation else name
        return f"{text} on {self._workers.infos[call.to].name}"

    def _left_error(self, call: Call) -> MpidistError:
        workers, to = self._workers, call.to
        error = RankFailureError(
            f"{self._describe(call)}: {workers.loss_of(to)}", (workers.world_ranks[to],)
        )
        error.calls = self._broken(call, "dead" if to in workers.dead else "left")
        return error

    def _broken(self, call: Call, end: str) -> tuple[str, ...]:
        """Return the chain of the calls that break with this one: see ``MpidistError.calls``."""
        return self._workers.me.name, f"{self._workers.infos[call.to].name}, {end}"
