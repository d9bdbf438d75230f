"""Incoming requests, one object each: decoding, the function's run, and the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import MpidistError
from mpidist.rpc import functions, message
from mpidist.rpc.calls.call_entries import CallEntries
from mpidist.rpc.calls.engine_messages import EngineMessages
from mpidist.rpc.calls.pending import PendingCalls
from mpidist.rpc.calls.reader import Reader
from mpidist.rpc.calls.references import References
from mpidist.rpc.calls.wire import Wire
from mpidist.rpc.message import FIRST_REMOTE, LAST_REMOTE, PAIR, Kind
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed, Refused
from mpidist.rpc.rref_store import Entry
from mpidist.rpc.serving import methods
from mpidist.rpc.serving.quiescence import Quiescence
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.log import logger
from mpidist.rpc.threads.polling import Polling
from mpidist.rpc.threads.pool import HANDLERS, InlinePolicy, Task
from mpidist.rpc.values import codec, remote_error
from mpidist.rpc.values.codec import EMPTY, Content
from mpidist.rpc.worker import Workers

# Times at which calls of functions broke, by the error's text, of which only the first is logged
# until none has come for so long.
_broken: dict[str, float] = {}
_lock = threading.Lock()
_REPEATED_S = 10.0
_MOST_TEXTS = 100

# Plain integers, because access to a member of an enumeration costs as much as a comparison.
_METHOD, _SERVICE, _RESULT = int(Kind.CALL_METHOD), int(Kind.CALL_SERVICE), int(Kind.RESULT)

# The largest tag that a recorder's entry holds. A caller's own numbers begin with 1.
_TAG = (1 << 63) - 1


class Server(Protocol):
    """The agent, as requests and their dispatcher use it."""

    workers: Workers
    wire: Wire
    reader: Reader
    references: References
    calls: PendingCalls
    handled: CallEntries
    engine_messages: EngineMessages
    quiescence: Quiescence
    polling: Polling
    policy: InlinePolicy
    allowed: Allowed | None
    gil_waits: list[float] | None


class Request:
    """A call from another worker. As an action it runs the function and sends the result."""

    __slots__ = ("_agent", "_incoming")

    may_block = True
    lane = HANDLERS

    def __init__(self, agent: Server, incoming: Incoming) -> None:
        self._agent = agent
        self._incoming = incoming

    def run(self) -> None:
        """Decode the call and run it: inline, or on another thread if it may take long."""
        agent, incoming = self._agent, self._incoming
        args: Sequence[object] = ()
        kwargs: dict[str, object] = {}
        try:
            flags, kind = incoming.flags, incoming.kind
            offset = incoming.start
            if FIRST_REMOTE <= kind <= LAST_REMOTE:
                offset += PAIR.size
                kind -= message.TO_REMOTE
            key, offset = message.unpack_name(incoming.data, offset, incoming.end)
            try:
                if kind == _METHOD:
                    function: callee.Function | None = partial(methods.call_method, key.decode())
                elif kind == _SERVICE and key:
                    function = partial(callee.resolve(kind, key), incoming.source)
                elif agent.allowed is not None and key:
                    function = agent.allowed.function(kind, key)
                else:
                    function = callee.resolve(kind, key) if key else None
            except BaseException:
                # The arguments are not decoded.
                agent.references.drop(incoming)
                raise
            if function is None:
                function, args, kwargs, key = self._pickled(offset)
            elif flags or offset != incoming.end:
                args, kwargs = agent.reader.decode_call(incoming, offset)
        except BaseException as error:
            self._log(error)
            self.fail(error)
            return
        polling = agent.polling
        if agent.policy.is_quick(key) or not polling.is_leading():
            self._call(function, args, kwargs, key)
        else:
            polling.pool.submit(Task(partial(self._call, function, args, kwargs, key)))

    def _pickled(self, offset: int) -> tuple[Any, Any, Any, Any]:
        agent, incoming = self._agent, self._incoming
        if agent.allowed is not None:
            agent.references.drop(incoming)
            raise Refused(
                "a call without a function's name came to a worker that reads data only "
                "(init_rpc(..., allowed=[...]))"
            )
        function, args, kwargs = agent.reader.decode(incoming, offset, False)
        name = getattr(function, "__qualname__", None)
        return function, args, kwargs, name if type(name) is str else type(function)

    def _call(
        self,
        function: callee.Function,
        args: Sequence[object],
        kwargs: dict[str, object],
        key: object,
    ) -> None:
        agent, incoming = self._agent, self._incoming
        if agent.gil_waits is not None:
            _measure_lock(agent.gil_waits)
        engine = interceptor.engine if incoming.context else None
        handled = agent.handled
        peer = agent.workers.world_ranks[incoming.source]
        entry = handled.begin(handled[key], 0, 0, peer, incoming.sequence & _TAG)
        start = time.monotonic()
        try:
            if engine is None:
                result = function(*args, **kwargs)
            else:
                with engine.entering(incoming.context, incoming.source, False):
                    result = function(*args, **kwargs)
            if hasattr(function, functions.MARK):
                result = functions.deferred_result(function, result)
        except BaseException as error:
            handled.fail(entry)
            self._log(error)
            self.fail(error)
            return
        finally:
            agent.policy.record(key, time.monotonic() - start)
        if type(result) is functions.DeferredResult:
            result.future.add_done_callback(partial(self._finish, entry))
        else:
            handled.end(entry)
            self.succeed(result)

    def _finish(self, entry: int, future: torch._C.Future) -> None:
        handled = self._agent.handled
        try:
            value = future.value()
        except BaseException as error:
            handled.fail(entry)
            self.fail(error)
        else:
            handled.end(entry)
            self.succeed(value)

    def succeed(self, value: object) -> None:
        """Answer with a result; with the error if the result cannot be sent."""
        incoming = self._incoming
        try:
            wire = self._agent.wire
            content = codec.encode(value, wire.data_only[incoming.source])
            wire.answer(incoming.source, _RESULT, incoming.sequence, incoming.context, content)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Answer with an exception. Never raises, so that no other request is affected."""
        try:
            data_only = self._agent.wire.data_only[self._incoming.source]
            description = remote_error.describe(error, data_only is not None)
            self._answer(Kind.EXCEPTION, codec.encode(description, data_only))
        except BaseException:
            logger.exception(
                "%s cannot answer a request of rank %d",
                self._agent.workers.me,
                self._incoming.source,
            )
            self._agent.wire.count_answer()

    def _answer(self, kind: int, content: Content) -> None:
        incoming = self._incoming
        self._agent.wire.answer(incoming.source, kind, incoming.sequence, incoming.context, content)

    def _log(self, error: BaseException) -> None:
        # A mutual recursion without end would log a traceback a level: of an error that came with
        # an answer, whose worker has logged it, or of the same broken call, level by level.
        if remote_error.is_from_another_worker(error) or _is_repeated(error):
            return
        logger.warning(
            "On %s: a function that was called from another worker raised",
            self._agent.workers.me,
            exc_info=error,
        )


class RemoteRequest(Request):
    """A call of ``remote``, whose result stays on this worker."""

    __slots__ = ("_entry",)

    def __init__(self, agent: Server, incoming: Incoming) -> None:
        super().__init__(agent, incoming)
        # Created on arrival: the last holder may delete it before the function has run.
        reference, fork = message.unpack_ids(incoming.data, incoming.start, incoming.end, 2)
        self._entry = agent.references.store.create_for(incoming.source, reference, fork)

    def succeed(self, value: object) -> None:
        """Store the result, and answer without it."""
        if isinstance(value, torch._C.Future):
            self.fail(
                MpidistError(
                    "Can not pickle torch.futures.Future; mark the function with "
                    "rpc.functions.async_execution"
                )
            )
            return
        self._agent.references.set_value(self._entry, value)
        try:
            self._answer(Kind.REMOTE_DONE, EMPTY)
        except BaseException as error:
            super().fail(error)

    def fail(self, error: BaseException) -> None:
        """Store the exception in place of the result, and answer with it."""
        # local_value raises it on this worker, where it must not interrupt or end the program.
        me = self._agent.workers.me
        kept = (
            remote_error.without_frames(error, me)
            if isinstance(error, Exception)
            else remote_error.rebuild(remote_error.describe(error), me)
        )
        self._entry.set(error=kept)
        super().fail(error)


class FetchRequest(Request):
    """A fetch of a value. It waits for the value without a thread."""

    __slots__ = ("_entry",)

    may_block = False

    def __init__(self, agent: Server, incoming: Incoming) -> None:
        super().__init__(agent, incoming)
        (reference,) = message.unpack_ids(incoming.data, incoming.start, incoming.end, 1)
        self._entry: Entry = agent.references.store.find(reference)

    def when_set(self) -> bool:
        """Return whether the value is set; if not, submit this request once it is."""
        if self._entry.is_set:
            return True
        pool = self._agent.polling.pool
        self._entry.when_set(lambda entry: pool.submit(Task(self.run)))
        return False

    def run(self) -> None:
        """Answer with the value, or with the exception of its creation."""
        if self._entry.error is not None:
            self.fail(self._entry.error)
        else:
            self.succeed(self._entry.value_here())


class EngineRequest(Request):
    """A request to distributed autograd."""

    __slots__ = ()

    def run(self) -> None:
        """Pass the request to the engine; answer with what the engine returns or raises."""
        agent, incoming = self._agent, self._incoming
        try:
            engine = interceptor.engine
            if engine is None:
                raise MpidistError(
                    f"{agent.workers.me.name} does not handle messages of kind "
                    f"{Kind(incoming.kind).name}: no autograd is in use"
                )
            obj = agent.reader.decode(incoming, incoming.start, False)
            result = engine.handle(incoming.source, incoming.kind, incoming.context, obj)
        except BaseException as error:
            self.fail(error)
        else:
            self.succeed(result)


def _is_repeated(error: BaseException) -> bool:
    """Return whether a call that a function has made broke with a text that was logged just now."""
    if not isinstance(error, MpidistError) or not error.calls:
        return False
    text, now = str(error), time.monotonic()
    with _lock:
        before = _broken.get(text)
        if len(_broken) > _MOST_TEXTS:
            _broken.clear()
        _broken[text] = now
    return before is not None and now - before < _REPEATED_S


def _measure_lock(waits: list[float]) -> None:
    """Release the GIL, and record how long this thread waits to get it back."""
    start = time.perf_counter()
    time.sleep(0)
    waits.append(time.perf_counter() - start)
    del waits[:-1000]
