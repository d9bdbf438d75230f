"""RPC agent of one worker: outgoing calls, incoming requests, and their threads.

Composed of ``wire`` and ``reader`` (messages out and in), ``calls`` (pending requests),
``references``, ``dispatcher`` (messages by kind) and ``polling`` (threads).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from mpidist.comm.memory.stream import device_at
from mpidist.comm.mpi import exited_ranks, runtime
from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.serialization.tensor_format import HOST
from mpidist.comm.transport.transport import Transport
from mpidist.errors import CommTimeout, RankFailureError
from mpidist.rpc import message
from mpidist.rpc.calls.call_entries import CallEntries
from mpidist.rpc.calls.engine_messages import EngineMessages
from mpidist.rpc.calls.pending import PendingCalls
from mpidist.rpc.calls.reader import Reader
from mpidist.rpc.calls.references import References
from mpidist.rpc.calls.wire import Wire
from mpidist.rpc.message import Kind
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed
from mpidist.rpc.options import RpcBackendOptions
from mpidist.rpc.serving.dispatcher import Dispatcher
from mpidist.rpc.serving.quiescence import COORDINATOR, Quiescence
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.polling import Polling
from mpidist.rpc.threads.pool import InlinePolicy
from mpidist.rpc.values.pickles import Reference
from mpidist.rpc.worker import WorkerInfo, Workers

# Python's switch interval while the agent runs: the longest wait for the GIL of a thread that has
# received a message, while one other thread computes in Python.
_SWITCH_INTERVAL_S = 2e-4
_STOP_S = 5.0

FORKED = (
    "this process was forked from a worker, and RPC does not work in it: call in the process that "
    "has called init_rpc, and hand the results to DataLoader workers and subprocesses"
)


class Agent:
    """One worker.

    Args:
        transport: Sends and receives its messages; its generation is this agent's.
        workers: All workers.
        device_maps: All workers' device maps, by rank: worker name to device index to device index.
            ``HOST`` stands for host memory.
        options: This worker's settings.
        allowed: The list of what others may call here; None for anything.
        make_reference: Makes a reference from (agent, reference, fork, owner's rank).
    """

    def __init__(
        self,
        transport: Transport,
        workers: Workers,
        device_maps: Sequence[Mapping[str, Mapping[int, int]]],
        options: RpcBackendOptions,
        allowed: Allowed | None,
        make_reference: Callable[[Agent, int, int, int], Reference],
    ) -> None:
        self.generation = transport.generation
        self.group = transport.group  # None for a worker alone
        self.options = options
        self.allowed = allowed
        self.workers = workers
        self.policy = InlinePolicy()
        self.gil_waits: list[float] | None = None  # seconds; None: not measured
        self.dispatcher = Dispatcher(transport)
        self.polling = Polling(
            self.dispatcher, options.num_worker_threads, f"rpc-{workers.me.name}"
        )
        self.wire = _make_wire(transport, workers, options, device_maps)
        devices = _devices(workers, options, device_maps)
        self.reader = Reader(allowed)
        self.calls = PendingCalls(
            workers,
            self.wire,
            self.reader,
            self.polling,
            options.rpc_timeout,
            devices,
            allowed is not None,
            lambda late: self.references.drop(late),
        )
        self.handled = CallEntries("handler", callee.title)
        me = workers.me
        recorder.of_process().group(me.name, WORKER, (workers.world_ranks[me.id],))
        self.engine_messages = EngineMessages(workers, self.wire, self.reader)
        self.references = References(
            workers,
            self.wire,
            self.reader,
            self.calls,
            self.polling,
            partial(make_reference, self),
            [device for one in devices if (device := device_at(one)) is not None],
        )
        self.quiescence = Quiescence(
            workers.me.id,
            len(workers.infos),
            partial(_send_words, self.wire, workers),
            self._activity,
            partial(_require_present, workers),
        )
        self.dispatcher.connect(self)
        self._switch_interval = sys.getswitchinterval()

    def start(self) -> None:
        """Start the threads that receive and answer."""
        if self._switch_interval > _SWITCH_INTERVAL_S:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self.polling.start()
        runtime.close_at_exit(self)

    def stop(self) -> None:
        """Stop answering; pending calls fail. Not collective."""
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
        """Send LEAVE to all other workers, then stop. Not collective; also runs at process exit."""
        if self.calls.is_stopped:
            return
        for worker in self.workers.infos:
            if worker != self.workers.me and worker.id not in self.workers.left:
                self.wire.post(worker.id, Kind.LEAVE)
        self.stop()

    def take_turns(self) -> None:
        """Have the agent's threads hold the lock of agreements in each later call of MPI."""
        self.dispatcher.take_turns()
        self.polling.await_poll()

    def refuse_fork(self) -> None:
        """Reject all use in a child process that was forked from this worker."""
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
            "agent.server_active_calls": str(
                self.dispatcher.requests_received - self.wire.answered
            ),
        }
        if self.gil_waits is not None:
            waits = self.gil_waits
            info["agent.gil_average_wait_time_us"] = (
                f"{sum(waits) / len(waits) * 1e6:.1f}" if waits else "0"
            )
        return info

    def _activity(self) -> tuple[int, ...]:
        """Return the counts for ``Quiescence``; the answers are read before the requests."""
        answered = self.wire.answered
        active = (
            self.calls.unfinished()
            + self.dispatcher.requests_received
            - answered
            + len(self.references.deletes)
        )
        return (
            active,
            self.calls.started,
            answered,
            self.wire.one_way_sent,
            self.dispatcher.one_way_received + self.engine_messages.handled,
        )


def _make_wire(
    transport: Transport,
    workers: Workers,
    options: RpcBackendOptions,
    device_maps: Sequence[Mapping[str, Mapping[int, int]]],
) -> Wire:
    """Make the wire: requests use this worker's own map, answers the inverse of the caller's."""
    request_maps = {
        workers.rank_of(name): _moves(pairs) for name, pairs in options.device_maps.items()
    }
    answer_maps = {
        rank: _moves({there: here for here, there in maps.get(workers.me.name, {}).items()})
        for rank, maps in enumerate(device_maps)
    }
    data_only = {rank: workers.infos[rank].name for rank in workers.data_only}
    return Wire(transport, request_maps, answer_maps, data_only)


def _devices(
    workers: Workers,
    options: RpcBackendOptions,
    device_maps: Sequence[Mapping[str, Mapping[int, int]]],
) -> list[torch.device]:
    """Return the CUDA devices here that send or receive tensors, by any worker's device map.

    Devices that are not here are left out: futures of them cannot be made, and a tensor for one is
    refused on arrival.
    """
    targets = [there for maps in device_maps for there in maps.get(workers.me.name, {}).values()]
    found = [*options.devices, *(torch.device("cuda", index) for index in targets if index != HOST)]
    count = torch.cuda.device_count() if found else 0
    return [device for device in dict.fromkeys(found) if device.index < count]


def _moves(device_map: Mapping[int, int]) -> dict[int, int]:
    """Return a device map without the host's memory mapped to itself, as without a map."""
    return {here: there for here, there in device_map.items() if (here, there) != (HOST, HOST)}


def _send_words(wire: Wire, workers: Workers, is_verdict: bool, words: Sequence[int]) -> None:
    """Send a report to the coordinator, or its verdict to all workers."""
    kind, receivers = (
        (Kind.QUIET_VERDICT, range(len(workers.infos)))
        if is_verdict
        else (Kind.QUIET_REPORT, (COORDINATOR,))
    )
    for rank in receivers:
        wire.post(rank, kind, 0, 0, message.pack_words(words))


def _require_present(workers: Workers, deadline: float, reason: Callable[[], str]) -> None:
    """Raise if the deadline has passed or a worker has left.

    Raises:
        CommTimeout: The deadline has passed.
        RankFailureError: A worker has left, or its process has ended.
    """
    if time.monotonic() > deadline:
        raise CommTimeout(f"{workers.me}: the other workers were not ready in time: {reason()}")
    mine = workers.world_ranks[workers.me.id]
    left = sorted(workers.left)
    gone = [workers.world_ranks[rank] for rank in left] or exited_ranks.among(
        [rank for rank in workers.world_ranks if rank != mine]
    )
    if gone:
        names = ", ".join(workers.infos[rank].name for rank in left) or "another rank"
        how = (
            "has died"
            if workers.dead >= workers.left > set()
            else ("has left without a graceful shutdown")
        )
        raise RankFailureError(f"{workers.me} waits for all workers, but {names} {how}", gone)
