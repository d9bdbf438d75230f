"""Dispatch of arrived messages by kind, on the polling thread and in the order of arrival.

Forks, deletes and the entries of calls of ``remote`` depend on that order and are handled at once.
All other work is returned as an action. A thread that waits for the answer to its own call takes up
that answer alone (``poll_answer``), where it depends on no order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpidist.comm.mpi import agreement_lock
from mpidist.comm.transport.incoming import Incoming
from mpidist.comm.transport.transport import Transport
from mpidist.errors import FrameError, RankFailureError
from mpidist.rpc import message
from mpidist.rpc.calls import engine_messages
from mpidist.rpc.calls.pending import PendingCalls
from mpidist.rpc.calls.references import References
from mpidist.rpc.message import (
    ANNOUNCED,
    AUTOGRAD,
    FIRST_ONE_WAY,
    FIRST_REMOTE,
    FIRST_RESPONSE,
    LAST_REMOTE,
    REFERENCES,
    Kind,
)
from mpidist.rpc.serving.requests import EngineRequest, FetchRequest, RemoteRequest, Request, Server
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.call import Call
from mpidist.rpc.threads.log import logger
from mpidist.rpc.threads.pool import HANDLED, Action

_MOST_MESSAGES = 16  # handled without a look at what is due
# Plain integers, as in ``requests``.
_ANSWERS = frozenset({int(Kind.RESULT), int(Kind.EXCEPTION)})
_REMOTE_DONE = int(Kind.REMOTE_DONE)
_COUNTED = frozenset({Kind.RREF_FORK, Kind.RREF_USER_DELETE}) | engine_messages.KINDS


class Dispatcher:
    """Handlers of messages, by kind.

    Attributes:
        requests_received: The number of requests that have arrived.
        one_way_received: The number of one-way messages that have been handled here. Both are
            written by the polling thread alone.
    """

    def __init__(self, transport: Transport) -> None:
        self.requests_received = self.one_way_received = 0
        self._messages = 0  # since the last look at what is due
        self._transport = transport
        self._receive = transport.poll
        self._peek = transport.peek
        self._agent: Server
        self._calls: PendingCalls
        self._references: References
        self._handlers: list[Callable[[Incoming], Action]]

    def connect(self, agent: Server) -> None:
        """Set the agent whose parts handle the messages; required before ``poll``."""
        self._agent, self._calls, self._references = agent, agent.calls, agent.references
        handlers: list[Callable[[Incoming], Action]] = [reject_kind] * 256
        for name in ("PYTHON", "BUILTIN", "SCRIPT", "METHOD"):
            handlers[Kind[f"CALL_{name}"]] = partial(Request, agent)
            handlers[Kind[f"REMOTE_{name}"]] = _pop_request
        handlers[Kind.CALL_SERVICE] = partial(Request, agent)
        handlers[Kind.RREF_FETCH] = self._start_fetch
        handlers[Kind.BACKWARD_AUTOGRAD] = partial(EngineRequest, agent)
        for kind in (Kind.RESULT, Kind.REMOTE_DONE, Kind.EXCEPTION):
            handlers[kind] = agent.calls.complete
        handlers[FIRST_ONE_WAY:] = [self._handle_one_way] * (256 - FIRST_ONE_WAY)
        self._handlers = handlers

    def take_turns(self) -> None:
        """Hold the lock of agreements in each later test and send; see ``agreement_lock``."""
        self._transport.take_turns()
        self._receive = agreement_lock.holding(self._receive)
        self._peek = agreement_lock.holding(self._peek)

    def poll_answer(self, call: Call, tests: int) -> bool | None:
        """Test at most ``tests`` times for the answer to a call, and give it to the call.

        Answers to calls of ``remote`` in front of it, from which no action follows, are taken up.
        The thread that waits for the call may be interrupted at each step: see ``transport``.

        Returns:
            Whether the call is done; False for a message that needs ``poll``, None for no message.
        """
        has_arrived, incoming = self._peek(tests)
        while (
            incoming is not None
            and incoming.kind == _REMOTE_DONE
            and not incoming.flags
            and self._calls.confirm(incoming)
        ):
            self._messages += 1
            self._transport.take(incoming)
            has_arrived, incoming = self._peek(tests)
        if not has_arrived:
            return None
        if (
            incoming is None
            or incoming.sequence != call.sequence
            or incoming.source != call.to
            or incoming.kind not in _ANSWERS
            or incoming.flags & (REFERENCES | ANNOUNCED)
        ):
            return False
        if incoming.flags & AUTOGRAD:
            try:
                self._agent.reader.unpack_preamble(incoming)
            except FrameError:
                return False
        # In this order: interrupted in between, the next poll drops the message, and no call that
        # waits for it is left.
        self._messages += 1
        self._calls.complete(incoming)
        self._transport.take(incoming)
        return call.done

    def is_due(self) -> bool:
        """Return whether ``do_what_is_due`` has something to do."""
        return bool(self._references.deletes) or self._calls.has_expired()

    def poll(self, tests: int) -> Action | None:
        """Test for a message at most ``tests`` times and handle it.

        Returns:
            The action that remains, ``HANDLED`` for none, or None if no message has arrived.
        """
        incoming = None
        try:
            # On busy cores each poll may find a message, for as long as the others go on calling.
            if self._messages >= _MOST_MESSAGES:
                self.do_what_is_due()
            incoming = self._receive(tests)
            if incoming is None:
                return HANDLED if self.do_what_is_due() else None
            self._messages += 1
            kind = incoming.kind
            if incoming.is_new:
                incoming.is_new = False
                if kind < FIRST_RESPONSE:
                    # Counted before anything can fail: a rejected request is answered as well.
                    self.requests_received += 1
                    if incoming.context:
                        interceptor.load().request_arrived(incoming.context, incoming.source)
                if incoming.flags & (AUTOGRAD | REFERENCES):
                    self._unpack_preamble(incoming)
                if FIRST_REMOTE <= kind <= LAST_REMOTE:
                    incoming.action = RemoteRequest(self._agent, incoming)
            if incoming.receives:
                return HANDLED
            if incoming.damage is not None:
                raise incoming.damage
            return self._handlers[kind](incoming)
        except FrameError as error:
            self._reject(incoming, error)
        except RankFailureError as failure:
            for rank in failure.ranks:
                workers = self._agent.workers
                if not self._transport.is_revoked:
                    logger.error("%s: %s has died", workers.me, workers.infos[rank].name)
                    workers.dead.add(rank)
                self._mark_left(rank)
        except Exception as error:
            if incoming is None:
                raise  # not the fault of a message
            # An unforeseen message must not end this worker, which serves all others.
            text = f"a message of kind {incoming.kind} from rank {incoming.source}"
            logger.exception("%s: %s failed", self._agent.workers.me, text)
            self._reject(incoming, FrameError(f"{text} cannot be taken up: {error!r}"))
        return HANDLED

    def do_what_is_due(self) -> bool:
        """Send the queued deletes, and fail calls whose time is over; return whether any was sent.

        Between messages and at the latest after ``_MOST_MESSAGES``: deletes that come together are
        one message.
        """
        self._messages = 0
        has_deletes = bool(self._references.deletes)
        if has_deletes:
            self._references.flush_deletes()
        if self._calls.has_expired():
            self._calls.expire()
        return has_deletes

    def _unpack_preamble(self, incoming: Incoming) -> None:
        agent = self._agent
        try:
            rows = agent.reader.unpack_preamble(incoming)
            agent.references.count_forks(incoming.source, rows)
        except FrameError:
            incoming.preamble = 0, ()  # no fork was counted, so none is deleted
            raise

    def _reject(self, incoming: Incoming | None, error: FrameError) -> None:
        """Reject a message that cannot be read; complete what waits for it.

        A request is answered with the error, a call fails, a one-way message counts as received.
        """
        agent = self._agent
        error = error if incoming is None or incoming.damage is None else incoming.damage
        logger.error("%s refused a message: %s", agent.workers.me, error)
        if incoming is None:
            return
        try:
            agent.references.drop(incoming)
            if incoming.kind < FIRST_RESPONSE:
                (incoming.action or Request(agent, incoming)).fail(error)
            elif incoming.kind < FIRST_ONE_WAY:
                agent.calls.fail(incoming.sequence, error, incoming.source)
        except Exception:
            logger.exception(
                "%s: a refused message of rank %d failed again", agent.workers.me, incoming.source
            )
        if incoming.kind in _COUNTED:
            self.one_way_received += 1
        if incoming.receives:
            incoming.kind = 0  # not handled again when its payloads arrive

    def _start_fetch(self, incoming: Incoming) -> Action:
        request = FetchRequest(self._agent, incoming)
        return request if request.when_set() else HANDLED

    def _handle_one_way(self, incoming: Incoming) -> Action:
        agent, kind = self._agent, incoming.kind
        if kind == Kind.RREF_FORK:
            agent.references.add_announced_forks(incoming)
        elif kind == Kind.RREF_USER_DELETE:
            agent.references.delete_forks(incoming)
        elif kind == Kind.LEAVE:
            self._mark_left(incoming.source)
            return HANDLED
        elif kind == Kind.QUIET_REPORT:
            agent.quiescence.receive_report(
                incoming.source, message.unpack_words(incoming.data, incoming.start, incoming.end)
            )
            return HANDLED
        elif kind == Kind.QUIET_VERDICT:
            agent.quiescence.receive_verdict(
                incoming.source, message.unpack_words(incoming.data, incoming.start, incoming.end)
            )
            return HANDLED
        elif kind in engine_messages.KINDS:
            return agent.engine_messages.handle(incoming) or HANDLED
        else:
            return reject_kind(incoming)
        self.one_way_received += 1
        return HANDLED

    def _mark_left(self, rank: int) -> None:
        self._agent.workers.left.add(rank)
        self._agent.calls.fail_to(rank)
        self._references.store.delete_forks_of(rank)
        if interceptor.engine is not None:
            interceptor.engine.worker_left(rank)


def reject_kind(incoming: Incoming) -> Action:
    """Raise for a message of a kind that has no handler.

    Raises:
        FrameError: Always.
    """
    raise FrameError(f"a message of unknown kind {incoming.kind} from rank {incoming.source}")


def _pop_request(incoming: Incoming) -> Action:
    # The request holds the message: if the message held the request too, both and the entry would
    # live until Python's collector runs.
    action: Action = incoming.action
    incoming.action = None
    return action
