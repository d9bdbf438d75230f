"""RPC agent of one worker: outgoing calls, incoming requests, and their threads.

Composed of ``wire`` (messages), ``calls`` (pending requests), ``references`` and ``polling``
(threads). The agent is what polls: it takes messages up in the order of their arrival. What must
keep that order (forks, deletes, the entries that calls of ``remote`` make) is done there and then;
all else is returned as an action.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mpidist.comm.mpi import exited_ranks, runtime
from mpidist.comm.transport.incoming import Incoming
from mpidist.comm.transport.transport import Transport
from mpidist.errors import CommTimeout, FrameError, RankFailureError
from mpidist.rpc import engine_messages, interceptor, message
from mpidist.rpc.allowlist import Allowed
from mpidist.rpc.calls import Calls
from mpidist.rpc.engine_messages import EngineMessages
from mpidist.rpc.inline_policy import InlinePolicy
from mpidist.rpc.message import AUTOGRAD, FIRST_ONE_WAY, FIRST_RESPONSE, REFERENCES, Kind
from mpidist.rpc.options import RpcBackendOptions
from mpidist.rpc.polling import Polling
from mpidist.rpc.pool import HANDLED, Action
from mpidist.rpc.quiescence import COORDINATOR, Quiescence
from mpidist.rpc.references import References
from mpidist.rpc.requests import EngineRequest, FetchRequest, RemoteRequest, Request
from mpidist.rpc.wire import Wire
from mpidist.rpc.worker import WorkerInfo, Workers

logger = logging.getLogger("mpidist.rpc")

# a thread that has seen a message waits so long for one that computes in Python
_SWITCH_INTERVAL_S = 2e-4
_STOP_S = 5.0
_COUNTED = frozenset({Kind.RREF_FORK, Kind.RREF_USER_DELETE}) | engine_messages.KINDS
_FIRST_REMOTE, _LAST_REMOTE = int(Kind.REMOTE_PYTHON), int(Kind.REMOTE_METHOD)


class Agent:
    """One worker.

    Args:
        transport: Carries its messages; its generation is this agent's.
        workers: All workers.
        device_maps: All workers' device maps, by rank: where each sends its tensors, by worker
            name.
        options: This worker's settings.
        allowed: What others may call here; None for anything.
        make_reference: Makes the reference of an (agent, reference, fork, owner).
    """

    def __init__(
        self,
        transport: Transport,
        workers: Workers,
        device_maps: Sequence[Mapping[str, Mapping[int, int]]],
        options: RpcBackendOptions,
        allowed: Allowed | None,
        make_reference: Callable[[Agent, int, int, int], Any],
    ) -> None:
        self.generation = transport.generation
        self.options = options
        self.allowed = allowed
        self.workers = workers
        self.policy = InlinePolicy()
        self.gil_waits: list[float] | None = None  # seconds; None: not measured
        # Requests go by our own map, answers back by the inverse of the caller's.
        requests = {workers.rank_of(name): made for name, made in options.device_maps.items()}
        answers = {
            rank: {there: here for here, there in maps.get(workers.me.name, {}).items()}
            for rank, maps in enumerate(device_maps)
        }
        self.polling = Polling(self._poll, options.num_worker_threads, f"rpc-{workers.me.name}")
        self.wire = Wire(
            transport,
            requests,
            answers,
            {rank: workers.infos[rank].name for rank in workers.data_only},
            allowed,
        )
        self.calls = Calls(
            workers,
            self.wire,
            self.polling,
            options.rpc_timeout,
            options.devices,
            allowed,
            lambda late: self.references.drop(late),
        )
        self.engine_messages = EngineMessages(workers, self.wire)
        self.references = References(
            workers, self.wire, self.calls, self.polling, partial(make_reference, self)
        )
        self.quiescence = Quiescence(
            workers.me.id,
            len(workers.infos),
            partial(_send_words, self.wire, workers),
            self._activity,
            partial(_check, workers),
        )
        self._transport = transport
        self._requests_received = self._one_way_received = 0  # changed on the polling thread alone
        self._switch_interval = sys.getswitchinterval()
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> list[Callable[[Incoming], Action]]:
        """Return by kind what takes a complete message and returns the action that is left."""
        handlers: list[Callable[[Incoming], Action]] = [_reject_kind] * 256
        for kind in (
            Kind.CALL_PYTHON,
            Kind.CALL_BUILTIN,
            Kind.CALL_SCRIPT,
            Kind.CALL_METHOD,
            Kind.CALL_SERVICE,
        ):
            handlers[kind] = partial(Request, self)
        for kind in (
            Kind.REMOTE_PYTHON,
            Kind.REMOTE_BUILTIN,
            Kind.REMOTE_SCRIPT,
            Kind.REMOTE_METHOD,
        ):
            handlers[kind] = _pop_request
        handlers[Kind.RREF_FETCH] = partial(_start_fetch, self)
        handlers[Kind.BACKWARD_AUTOGRAD] = partial(EngineRequest, self)
        handlers[Kind.RESULT] = handlers[Kind.REMOTE_DONE] = handlers[Kind.EXCEPTION] = (
            self.calls.complete
        )
        handlers[FIRST_ONE_WAY:] = [self._handle_one_way] * (256 - FIRST_ONE_WAY)
        return handlers

    def start(self) -> None:
        """Begin to answer."""
        if self._switch_interval > _SWITCH_INTERVAL_S:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self.polling.start()
        runtime.close_at_exit(self)

    def stop(self) -> None:
        """Stop answering; calls under way fail. Not collective."""
        if self.calls.is_stopped:
            return
        self.calls.stop()
        self.wire.is_stopped = True
        if interceptor.engine is not None:
            interceptor.engine.stopped()
        self.polling.stop(_STOP_S)
        sys.setswitchinterval(self._switch_interval)
        self.references.store.clear()

    def close(self, timeout_s: float = 0.0) -> None:
        """Tell the others that this worker answers no more, then stop: at the end of the process, too. Not collective."""
        if self.calls.is_stopped:
            return
        for worker in self.workers.infos:
            if worker != self.workers.me and worker.id not in self.workers.left:
                self.wire.post(worker.id, Kind.LEAVE)
        self.stop()

    def refuse_fork(self) -> None:
        """Refuse all use in a child process that was forked from this worker."""
        self.calls.stop_reason = FORKED
        self.calls.is_stopped = self.wire.is_stopped = True

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers."""
        return list(self.workers.infos)

    def get_debug_info(self) -> dict[str, str]:
        """Return counters, with torch's names."""
        threads, idle, queued = self.polling.pool.counts()
        info = {
            "agent.num_pending_requests": str(len(self.calls)),
            "agent.thread_pool_size": str(threads),
            "agent.num_idle_threads": str(idle),
            "agent.num_running_or_queued": str(queued),
            "agent.server_active_calls": str(self._requests_received - self.wire.answered),
        }
        if self.gil_waits is not None:
            waits = self.gil_waits
            info["agent.gil_average_wait_time_us"] = (
                f"{sum(waits) / len(waits) * 1e6:.1f}" if waits else "0"
            )
        return info

    # On the polling thread.

    def _poll(self, looks: int) -> Action | None:
        incoming = None
        try:
            incoming = self._transport.poll(looks)
            if incoming is None:
                if self.references.deletes:
                    self.references.flush_deletes()
                    return HANDLED
                if self.calls.has_expired():
                    self.calls.expire()
                return None
            kind = incoming.kind
            if incoming.is_new:
                incoming.is_new = False
                if kind < FIRST_RESPONSE:
                    self._requests_received += 1  # first: one that is refused is answered, too
                    if incoming.context:
                        interceptor.load().request_arrived(incoming.context, incoming.source)
                if incoming.flags & (AUTOGRAD | REFERENCES):
                    self._unpack_preamble(incoming)
                if _FIRST_REMOTE <= kind <= _LAST_REMOTE:
                    incoming.action = RemoteRequest(self, incoming)
            if incoming.receives:
                return HANDLED
            if incoming.damage is not None:
                raise incoming.damage
            return self._handlers[kind](incoming)
        except FrameError as error:
            self._refuse(incoming, error)
        except RankFailureError as failure:
            for rank in failure.ranks:
                logger.error("%s: %s has died", self.workers.me, self.workers.infos[rank].name)
                self._worker_left(rank)
        except Exception as error:
            if incoming is None:
                raise  # not a message's fault
            # Nobody foresaw such a message. It must not end this worker for all others.
            logger.exception(
                "%s: a message of kind %d from rank %d failed",
                self.workers.me,
                incoming.kind,
                incoming.source,
            )
            self._refuse(
                incoming,
                FrameError(f"a message of kind {incoming.kind} cannot be taken up: {error!r}"),
            )
        return HANDLED

    def _unpack_preamble(self, incoming: Incoming) -> None:
        try:
            self.references.count_forks(incoming.source, self.wire.unpack_preamble(incoming))
        except FrameError:
            incoming.noted = None  # none of its references is counted, and so none is let go
            raise

    def _refuse(self, incoming: Incoming | None, error: FrameError) -> None:
        """Have nobody wait for a message that cannot be read: its sender, its call, or the quiescence of all."""
        error = error if incoming is None or incoming.damage is None else incoming.damage
        logger.error("%s refused a message: %s", self.workers.me, error)
        if incoming is None:
            return
        try:
            self.references.drop(incoming)
            if incoming.kind < FIRST_RESPONSE:
                (incoming.action or Request(self, incoming)).fail(error)
            elif incoming.kind < FIRST_ONE_WAY:
                self.calls.fail(incoming.sequence, error, incoming.source)
        except Exception:
            logger.exception(
                "%s: a refused message of rank %d failed again", self.workers.me, incoming.source
            )
        if incoming.kind in _COUNTED:
            self._one_way_received += 1
        if incoming.receives:
            incoming.kind = 0  # not to be taken up, and answered again, once its payloads are here

    def _handle_one_way(self, incoming: Incoming) -> Action:
        kind = incoming.kind
        if kind == Kind.RREF_FORK:
            self.references.add_announced_forks(incoming)
        elif kind == Kind.RREF_USER_DELETE:
            self.references.delete_forks(incoming)
        elif kind == Kind.LEAVE:
            self._worker_left(incoming.source)
            return HANDLED
        elif kind == Kind.QUIET_REPORT:
            self.quiescence.receive_report(
                incoming.source, message.unpack_words(incoming.data, incoming.start, incoming.end)
            )
            return HANDLED
        elif kind == Kind.QUIET_VERDICT:
            self.quiescence.receive_verdict(
                incoming.source, message.unpack_words(incoming.data, incoming.start, incoming.end)
            )
            return HANDLED
        elif kind in engine_messages.KINDS:
            return self.engine_messages.handle(incoming) or HANDLED
        else:
            return _reject_kind(incoming)
        self._one_way_received += 1
        return HANDLED

    def _worker_left(self, rank: int) -> None:
        self.workers.left.add(rank)
        self.calls.fail_to(rank)
        if interceptor.engine is not None:
            interceptor.engine.worker_left(rank)

    def _activity(self) -> tuple[int, ...]:
        answered = self.wire.answered
        active = len(self.calls) + self._requests_received - answered + len(self.references.deletes)
        return (
            active,
            self.calls.started,
            answered,
            self.wire.one_way_sent,
            self._one_way_received + self.engine_messages.handled,
        )


FORKED = (
    "this process was forked from a worker, and RPC does not work in it: call in the process that "
    "has called init_rpc, and hand "
    "the results to DataLoader workers and subprocesses"
)


def _send_words(wire: Wire, workers: Workers, is_verdict: bool, words: Sequence[int]) -> None:
    """Send a report to the coordinator, or its verdict to all."""
    kind, receivers = (
        (Kind.QUIET_VERDICT, range(len(workers.infos)))
        if is_verdict
        else (Kind.QUIET_REPORT, (COORDINATOR,))
    )
    for rank in receivers:
        wire.post(rank, kind, 0, 0, message.pack_words(words))


def _check(workers: Workers, deadline: float, reason: Callable[[], str]) -> None:
    """Raise if a wait for all workers is to end."""
    if time.monotonic() > deadline:
        raise CommTimeout(f"{workers.me}: the other workers were not ready in time: {reason()}")
    mine = workers.world_ranks[workers.me.id]
    gone = sorted(workers.left) or exited_ranks.among(
        [rank for rank in workers.world_ranks if rank != mine]
    )
    if gone:
        names = (
            ", ".join(workers.infos[rank].name for rank in sorted(workers.left)) or "another rank"
        )
        raise RankFailureError(
            f"{workers.me} waits for all workers, but {names} has left without a graceful shutdown",
            gone,
        )


def _start_fetch(agent: Agent, incoming: Incoming) -> Action:
    request = FetchRequest(agent, incoming)
    return request if request.when_set() else HANDLED


def _pop_request(incoming: Incoming) -> Action:
    # Taken out: request and message would hold each other, and the entry with them, until Python's
    # collector runs.
    action: Action = incoming.action
    incoming.action = None
    return action


def _reject_kind(incoming: Incoming) -> Action:
    raise FrameError(f"a message of unknown kind {incoming.kind} from rank {incoming.source}")
