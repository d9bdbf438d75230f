"""One worker's end of all calls: what it has asked, what it is asked, and the threads that see to both.

A request leaves in the caller's thread. Letters are taken up in the order of their arrival, by whoever polls (``polling``): what
must keep that order (forks, deletes, the entries that calls of ``remote`` make) happens there and then (``Handler.note``), all
else as an action afterwards (``dispatch``).
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm import runtime
from mpidist.comm.mailbox import Arrival, Mailbox
from mpidist.errors import FrameError, MpidistError, RankFailureError
from mpidist.rpc import codec, interceptor, message, remote_error
from mpidist.rpc.allowed import Allowed
from mpidist.rpc.board import Board
from mpidist.rpc.call import Call, RpcFuture
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.message import MAX_FORKS, RESPONSES, Content, Header, Kind
from mpidist.rpc.options import RpcBackendOptions, seconds
from mpidist.rpc.pending import PendingCalls
from mpidist.rpc.polling import NOTHING_LEFT, Action, Polling
from mpidist.rpc.quickness import Quickness
from mpidist.rpc.rref_store import Entry, RRefStore
from mpidist.rpc.target import target_of
from mpidist.rpc.worker import WorkerInfo

logger = logging.getLogger("mpidist.rpc")

_SWITCH_INTERVAL_S = 2e-4  # a thread that has seen a message waits so long for one that computes in Python
_STOP_S = 5.0
_EMPTY = Content()


class Agent:
    """One worker.

    Args:
        mailbox: What carries the letters.
        generation: How many agents have used the mailbox before; the same on all ranks.
        workers: All workers, by rank.
        device_maps: All workers' device maps, by rank: where each sends its tensors, by worker name.
        options: This worker's settings.
        allowed: What others may call here; None for anything.
        adopt: Makes the reference of an (agent, reference, fork, owner).
        handlers: What is done with each kind of message (``dispatch.HANDLERS``).
    """

    def __init__(
        self,
        mailbox: Mailbox,
        generation: int,
        workers: Sequence[WorkerInfo],
        device_maps: Sequence[Mapping[str, Mapping[int, int]]],
        options: RpcBackendOptions,
        allowed: Allowed | None,
        adopt: Callable[[Agent, int, int, int], Any],
        handlers: Mapping[int, Any],
    ) -> None:
        self.generation = generation
        self.me = workers[mailbox.rank]
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.allowed = allowed
        self.store = RRefStore(self.me.id)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.polling = Polling(self._poll, options.num_worker_threads, f"rpc-{self.me.name}")
        self.quickness = Quickness()
        self.board = Board()
        self.world_ranks = mailbox.group.world_ranks if mailbox.group is not None else (0,)
        self.creations: set[Any] = set()  # calls of ``remote`` that the owner has not answered
        self.left: set[int] = set()
        self.is_stopped = False
        self._mailbox = mailbox
        self._workers = tuple(workers)
        self._ranks = {worker.name: worker.id for worker in workers}
        self._handlers = handlers
        self._adopt = partial(adopt, self)
        self._unpickler = pickle.Unpickler if allowed is None else allowed.unpickler
        self._pending = PendingCalls()
        self._deletes: deque[tuple[int, int, int]] = deque()
        self._count_lock = threading.Lock()
        self._taken = self._answered = self._one_way_sent = self._one_way_taken = self._started = 0
        # Requests go by our own map, answers back by the inverse of the caller's.
        self._request_maps = {self._ranks[name]: made for name, made in options.device_maps.items() if name in self._ranks}
        self._answer_maps = {
            rank: {there: here for here, there in maps.get(self.me.name, {}).items()} for rank, maps in enumerate(device_maps)
        }
        self._switch_interval = sys.getswitchinterval()
        self.gil_waits: list[float] | None = None  # seconds; None: not measured

    def start(self) -> None:
        """Begin to answer."""
        if self._switch_interval > _SWITCH_INTERVAL_S:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self.polling.start()
        runtime.close_at_exit(self)

    def stop(self) -> None:
        """Stop answering; calls under way fail. Not collective."""
        if self.is_stopped:
            return
        self.is_stopped = True
        for call in self._pending.taken(lambda call: True):
            self._fail(call, MpidistError(f"{call.what}: RPC was shut down on this worker"))
        self.polling.stop(_STOP_S)
        sys.setswitchinterval(self._switch_interval)
        self.store.clear()

    def leave(self) -> None:
        """Tell the others that this worker answers no more, then stop. Not collective."""
        if self.is_stopped:
            return
        for worker in self._workers:
            if worker != self.me and worker.id not in self.left:
                self.post(worker.id, Header(Kind.LEAVE, self.generation), _EMPTY)
        self.stop()

    def close(self, timeout_s: float) -> None:
        """End with the process (``runtime.close_at_exit``)."""
        self.leave()

    # Who is who.

    def worker(self, rank: int) -> WorkerInfo:
        """Return a worker by rank."""
        return self._workers[rank]

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers."""
        return list(self._workers)

    def rank_of(self, to: Any) -> int:
        """Return the rank of a worker that is named, numbered or described.

        A worker that has left RPC keeps its rank; a call to it raises RankFailureError.

        Raises:
            ValueError: Neither a name, nor a rank, nor a worker.
            MpidistError: No such worker.
        """
        if isinstance(to, str):
            rank = self._ranks.get(to, -1)
        elif isinstance(to, int) and not isinstance(to, bool):
            rank = to
        elif hasattr(to, "name") and hasattr(to, "id"):
            rank = self._ranks.get(to.name, -1)
        else:
            raise ValueError(f"a worker is a name, a rank or a WorkerInfo; got {to!r}")
        if not 0 <= rank < len(self._workers):
            names = ", ".join(worker.name for worker in self._workers[:8])
            raise MpidistError(
                f"could not find destination {to!r}: the {len(self._workers)} workers are {names}"
                f"{', ...' if len(self._workers) > 8 else ''}"
            )
        return rank

    # Calls.

    def request(
        self,
        to: int,
        kind: int,
        obj: Any,
        timeout: float,
        what: str,
        ids: tuple[int, ...] = (),
        future: bool = False,
        settle: Callable[[Call], None] | None = None,
    ) -> Call:
        """Send a request.

        Args:
            to: The callee's rank.
            obj: What its content is; None for none.
            timeout: Seconds; 0 for none, -1 for the agent's.
            what: For messages.
            ids: The kind's.
            future: Give the call a future.
            settle: See ``Call.settle``.

        Raises:
            Exception: ``obj`` cannot be pickled; nothing is sent then.
        """
        if self.is_stopped:
            raise MpidistError(f"RPC was shut down; {what} cannot be sent")
        encoding = _encoded(obj)
        call = Call(to, what, self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else seconds(timeout))
        if future:
            call.future = RpcFuture(self.wait, call, self.options.devices or None)
        call.settle = settle
        if to in self.left:
            self._fail(call, self._has_left(call))
            return call
        call.sequence = self._pending.next_sequence()
        header = Header(kind, self.generation, call.sequence, ids)
        content = self._content(encoding, to, header, None)
        self._started += 1
        self._pending.add(call)
        self.post(to, header, content)
        if to in self.left and self._pending.pop(call.sequence) is not None:
            self._fail(call, self._has_left(call))
        return call

    def wait(self, call: Call, deadline: float) -> None:
        """Wait until a call is done; at its deadline it is done with an error."""
        self.polling.wait(call, deadline)
        if not call.done:
            self._expire()
            if not call.done:
                call.park(1.0)  # another thread is completing it
            if not call.done and self.is_stopped:
                self._fail(call, MpidistError(f"RPC was shut down on this worker before {call.what} was answered"))

    def wait_for_result(self, call: Call) -> Any:
        """Wait for a call without a future; return what its answer holds, or raise it."""
        if not call.done:
            self.wait(call, call.deadline)
        if call.error is not None:
            raise call.error
        return self._result_of(call)

    def invoke(self, to: int, function: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        """Call a function on a worker and return its result."""
        kind, named, what = target_of(function)
        return self.wait_for_result(self.request(to, kind, (named, args, kwargs), timeout, f"{what} on {self._workers[to].name}"))

    def invoke_async(self, to: int, function: Any, args: Any, kwargs: Any, timeout: float) -> RpcFuture:
        """Call a function on a worker and return a future of its result."""
        kind, named, what = target_of(function)
        call = self.request(to, kind, (named, args, kwargs), timeout, f"{what} on {self._workers[to].name}", future=True)
        self.polling.help()
        assert call.future is not None
        return call.future

    # Answers.

    def answer(self, to: int, sequence: int, kind: int, obj: Any, outer: Any) -> None:
        """Answer a request with an object; with the reason if that cannot be pickled."""
        header = Header(kind, self.generation, sequence)
        try:
            content = self._content(_encoded(obj), to, header, outer)
        except Exception as error:
            self.answer_error(to, sequence, error)
            return
        self._answer(to, header, content)

    def answer_error(self, to: int, sequence: int, error: BaseException) -> None:
        """Answer a request with an exception."""
        content = Content(pickle.dumps(remote_error.described(error), 5))
        self._answer(to, Header(Kind.EXCEPTION, self.generation, sequence), content)

    def _answer(self, to: int, header: Header, content: Content) -> None:
        if not self.is_stopped:
            self.post(to, header, content)
        with self._count_lock:
            self._answered += 1

    def decoded(self, arrival: Arrival) -> Any:
        """Return the object that a complete message holds."""
        header = arrival.note
        content = message.content_of(header, arrival.letter, arrival.parts)
        if not len(content.pickled):
            return None
        arrival.bring()
        attach = None
        if header.outer is not None and (engine := interceptor.registered()) is not None:
            attach = partial(engine.arriving, arrival.source, header.outer)
        return codec.decode(content, self._adopt, self.forget, attach, self._unpickler)

    # References.

    def announce(self, owner: int, reference: int, fork: int) -> None:
        """Tell an owner that there is one more holder, before that holder hears of it."""
        self._one_way(owner, Header(Kind.RREF_FORK, self.generation, 0, (reference, fork)))

    def queue_delete(self, owner: int, reference: int, fork: int) -> None:
        """Put down that a holder is gone; told to the owner by whoever polls. Callable from finalizers."""
        self._deletes.append((owner, reference, fork))

    def forget(self, reference: int, fork: int, owner: int) -> None:
        """Drop a reference that came in a message and was not made."""
        self.queue_delete(owner, reference, fork)

    def wait_for_entry(self, entry: Entry, timeout_s: float, creation: Any) -> None:
        """Wait until a value of this worker is there, or its creation is lost.

        Raises:
            CommTimeout: Not there in time.
        """
        call = Call(self.me.id, f"the value of reference {entry.reference:#x}", timeout_s)
        entry.when_set(lambda _: call.finish())
        if creation is not None:
            creation.future().add_done_callback(lambda future: call.finish() if creation.lost and not call.done else None)
        self.polling.wait(call, call.deadline)
        if not call.done:
            raise call.timed_out()

    def future_of_entry(self, entry: Entry, function: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Return a future of ``function(value)`` of a value of this worker."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete(entry: Entry) -> None:
            if entry.error is not None:
                future.set_exception(entry.error)
            else:
                future.set_result(function(entry.value))

        entry.when_set(complete)
        return future

    # What others ask.

    def take(self) -> None:
        """Note that a request is to be answered; called by the polling thread."""
        self._taken += 1

    def take_one_way(self) -> None:
        """Note that a message without an answer has come; called by the polling thread."""
        self._one_way_taken += 1

    def pop_call(self, sequence: int) -> Call | None:
        """Return the call that an answer is for, once; None if it has timed out."""
        return self._pending.pop(sequence)

    def complete(self, call: Call) -> None:
        """Complete the future of an asynchronous call whose answer has come."""
        assert call.future is not None
        try:
            result = self._result_of(call)
        except BaseException as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
        call.finish()

    def worker_left(self, rank: int) -> None:
        """Fail what waits for a worker that answers no more."""
        self.left.add(rank)
        for call in self._pending.taken(lambda call: call.to == rank):
            self._fail(call, self._has_left(call))

    def totals(self) -> tuple[int, int, int, int, int]:
        """Return calls and requests under way, and how many calls, answers, and one-way messages there have been."""
        with self._count_lock:
            active = len(self._pending) + self._taken - self._answered + len(self._deletes)
            return active, self._started, self._answered, self._one_way_sent, self._one_way_taken

    def get_debug_info(self) -> dict[str, str]:
        """Return counters, with torch's names."""
        threads, idle, queued = self.polling.counts()
        info = {
            "agent.num_pending_requests": str(len(self._pending)),
            "agent.thread_pool_size": str(threads),
            "agent.num_idle_threads": str(idle),
            "agent.num_running_or_queued": str(queued),
            "agent.server_active_calls": str(self._taken - self._answered),
        }
        if self.gil_waits is not None:
            waits = self.gil_waits
            info["agent.gil_average_wait_time_us"] = f"{sum(waits) / len(waits) * 1e6:.1f}" if waits else "0"
        return info

    # Messages.

    def _content(self, encoding: codec.Encoding | None, to: int, header: Header, answered: Any) -> Content:
        if encoding is None:
            return _EMPTY
        engine = interceptor.registered()
        if engine is not None:
            header.outer = engine.leaving(to, encoding.tensors, answered)
        maps = self._answer_maps if header.kind in RESPONSES else self._request_maps
        content = encoding.content(to, maps.get(to))
        if not encoding.forks:
            return content
        pairs = [(reference, fork) for reference, fork, owner in encoding.forks if owner == to]
        for reference, fork in pairs[MAX_FORKS:]:
            self.announce(to, reference, fork)
        header.forks = pairs[:MAX_FORKS]
        return content

    def _one_way(self, to: int, header: Header) -> None:
        if self.is_stopped or to in self.left:
            return
        with self._count_lock:
            self._one_way_sent += 1
        self.post(to, header, _EMPTY)

    def post(self, to: int, header: Header, content: Content) -> None:
        """Send a message."""
        self._mailbox.send(to, *message.written(header, content))

    def _poll(self) -> Action | None:
        try:
            arrival = self._mailbox.poll()
            if arrival is None:
                if self._deletes:
                    self._flush_deletes()
                    return NOTHING_LEFT
                if self._pending.has_expired():
                    self._expire()
                return None
            return self._taken_up(arrival)
        except FrameError as error:
            logger.error("%s refused a message: %s", self.me, error)
            return NOTHING_LEFT

    def _taken_up(self, arrival: Arrival) -> Action:
        header = arrival.note
        if header is None:
            header = message.header_of(arrival.letter)
            if header.generation != self.generation:
                logger.debug("%s dropped a message of generation %d", self.me, header.generation)
                return NOTHING_LEFT
            arrival.note = header
            if header.forks:
                self.store.add_forks(header.forks)
            handler = self._handlers[header.kind]
            if handler.note is not None:
                header.noted = handler.note(self, arrival.source, header)
        else:
            handler = self._handlers[header.kind]
        if not arrival.is_complete or handler.act is None:
            return NOTHING_LEFT
        action: Action = handler.act(self, arrival, header)
        return action

    def _flush_deletes(self) -> None:
        while self._deletes:
            owner, reference, fork = self._deletes.popleft()
            if owner == self.me.id:
                self.store.delete_fork(reference, fork)
            else:
                self._one_way(owner, Header(Kind.RREF_USER_DELETE, self.generation, 0, (reference, fork)))

    # The end of calls.

    def _result_of(self, call: Call) -> Any:
        if call.arrival.note.kind == Kind.EXCEPTION:
            raise self.error_of(call)
        return self.decoded(call.arrival)

    def error_of(self, call: Call) -> BaseException:
        """Return what a call raised on the other worker."""
        description = self.decoded(call.arrival)
        return remote_error.rebuilt(description, self._workers[call.to], self._unpickler)

    def _expire(self) -> None:
        for call in self._pending.expired():
            self._fail(call, call.timed_out())

    def _has_left(self, call: Call) -> MpidistError:
        name = self._workers[call.to].name
        rank = self.world_ranks[call.to]
        return RankFailureError(
            f"{call.what}: {name} has left RPC (shutdown without graceful, or the end of its program)", (rank,)
        )

    def _fail(self, call: Call, error: BaseException) -> None:
        call.error = error
        if call.settle is not None:
            call.settle(call)
        if call.future is None:
            call.finish()
        elif call.future.has_callbacks and not self.is_stopped:
            self.polling.submit(partial(_fail_future, call, error))
        else:
            _fail_future(call, error)


def _encoded(obj: Any) -> codec.Encoding | None:
    return codec.Encoding(obj, needs_tensors=interceptor.registered() is not None) if obj is not None else None


def _fail_future(call: Call, error: BaseException) -> None:
    assert call.future is not None
    call.future.set_exception(error)
    call.finish()
