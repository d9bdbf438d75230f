"""Public functions of RPC, with torch's names and meanings."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.group import ProcessGroup
from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.transport.transport import Transport
from mpidist.dynamo import untraced
from mpidist.errors import MpidistError
from mpidist.rpc import current, membership, rref, worker_gather
from mpidist.rpc.agent import FORKED, Agent
from mpidist.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from mpidist.rpc.names.allowlist import Allowed, make_allowlist
from mpidist.rpc.options import BackendType, RpcBackendOptions, seconds, select_options
from mpidist.rpc.rref_store import Entry
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.call import RpcFuture, wait_for_all
from mpidist.rpc.threads.pool import here
from mpidist.rpc.worker import Destination, WorkerInfo, Workers, check_name

P = ParamSpec("P")
T = TypeVar("T")

# torch's switch: with False, ``shutdown`` raises for references that were not deleted.
_ignore_rref_leak = True
_thread_local_var = threading.local()
_create = rref.RRef.create


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    group: ProcessGroup | None = None,
    allowed: Sequence[object] | None = None,
) -> None:
    """Make this process a worker that can call others and be called.

    Collective: over all ranks of the job, or of ``group``; local with ``world_size`` 1. No port is
    opened; messages are received from these ranks only.

    Blocks: until all of these ranks have called it.

    Args:
        name: This worker's name, unique in the group: letters, digits, ``-``, ``_`` and ``:``.
        backend: None, or a member of ``BackendType``; MPI sends the messages in both cases.
        rank: -1, or this process's rank in the group as MPI has assigned it.
        world_size: None, or the number of ranks. A smaller number than the job's selects the first
            ranks; all ranks must have called ``mpidist.comm.init()`` before.
        rpc_backend_options: Timeouts, threads, device maps.
        group: The ranks that become workers; all ranks of the job if None.
        allowed: What others may call here: functions, classes, modules (the public functions that
            they define) and operators, or their names (``"module.function"``, ``"module"``,
            ``"torch.add"``); anything if None. A worker with a list decodes data only and runs
            nothing outside the list: others send it plain data, tensors, arrays and references.
            See SECURITY.md.

    Raises:
        TypeError: An argument of a wrong type.
        ValueError: A name in ``allowed`` that does not exist.
        MpidistError: RPC is initialised already; two workers have the same name, or another worker
            has failed (both on all ranks); ``rank`` or ``world_size`` differs from MPI's;
            ``MPIDIST_TRUST=data`` without a list.
    """
    if current.agent is not None:
        raise MpidistError("RPC is already initialized: call mpidist.rpc.shutdown() first")
    transport = membership.transport_of(world_size, group)
    options, allowlist, problem = RpcBackendOptions(), None, None
    try:
        membership.check_place(transport, rank, world_size)
        options = select_options(backend, rpc_backend_options)
        check_name(name)
        # Imports modules, of which one may end the program.
        allowlist = make_allowlist(allowed)
        # Before the exchange: a worker that knows this one may send at once.
        transport.open_receives()
    except BaseException as error:
        # Raised after the exchange, because the other workers wait for this one.
        problem = error
    # Before the start: the first request may arrive immediately.
    current.agent = agent = _make_agent(transport, name, options, allowlist, problem)
    agent.start()


def _make_agent(
    transport: Transport,
    name: str,
    options: RpcBackendOptions,
    allowlist: Allowed | None,
    problem: BaseException | None,
) -> Agent:
    """Exchange descriptions with the other workers; return the agent, not started."""
    workers, device_maps = membership.gather_workers(
        transport, name, options.device_maps, allowlist is not None, problem
    )
    # So that a report names the worker, not its rank.
    recorder.of_process().group(name, WORKER, (workers.world_ranks[workers.me.id],))
    return Agent(transport, workers, device_maps, options, allowlist, rref.from_wire)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End RPC on this worker; ``init_rpc`` may be called again.

    Collective: if ``graceful``, over all workers.

    Blocks: if ``graceful``, until all workers have called it and no message is in flight between
    them, including calls that handlers and callbacks of futures still make, and all callbacks have
    ended. This worker answers calls meanwhile. If not
    ``graceful``, the function notifies the others and returns; their calls to this worker fail.

    Args:
        graceful: Wait for all workers.
        timeout: Seconds to wait; 0 for no limit.

    Raises:
        CommTimeout: The other workers were not ready in time. RPC has ended on this worker.
        MpidistError: ``graceful``, in a handler or a callback of a future, which would wait for
            itself; RPC goes on. References were not deleted, and ``api._ignore_rref_leak`` is
            False.
    """
    agent = current.require()
    deadline = _deadline(timeout)
    if graceful and here.thread is not None:
        raise MpidistError(
            "shutdown() waits for all handlers and callbacks of futures, and so for the one that "
            "has called it: call it in the program's own thread, or shutdown(graceful=False)"
        )
    try:
        if graceful:
            agent.quiescence.wait(deadline)
            _delete_all_user_and_unforked_owner_rrefs()
            agent.quiescence.wait(deadline)
            # All workers shut down: no LEAVE message is needed.
            leaks = agent.references.store.leaks()
            agent.stop()
            _refuse_leaks(agent, leaks)
    finally:
        agent.close()
        current.agent = None
        worker_gather.reset()


@untraced
def rpc_sync(
    to: Destination,
    func: Callable[..., object],
    args: Iterable[object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call ``func(*args, **kwargs)`` on worker ``to`` and return its result.

    Arguments and results may hold dense and sparse (COO) tensors, references, arrays, and all that
    can be pickled. Functions are sent by name.

    Blocks: until the result is there.

    Args:
        to: A name, a rank or a WorkerInfo.
        func: A function, class, builtin operator of torch or script function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds; 0 for no limit. Default: ``rpc_timeout`` of the options.

    Raises:
        CommTimeout: No answer in time (a ``RuntimeError`` and a ``TimeoutError``).
        RankFailureError: The worker has left.
        Exception: ``func`` has raised it; the remote traceback is its cause.
        RemoteError: ``func`` has raised an exception that cannot be rebuilt here.
    """
    agent = current.agent or current.require()
    rank, invoke = agent.workers.rank_of(to), agent.calls.invoke
    if torch_profiler._is_profiler_enabled:
        invoke = _record_calls(invoke, "sync", func, agent.workers, rank)
    return invoke(rank, func, args, kwargs, timeout)


@untraced
def rpc_async(
    to: Destination,
    func: Callable[..., object],
    args: Iterable[object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RpcFuture:
    """Call ``func(*args, **kwargs)`` on worker ``to``; return a future of its result.

    The future is a ``torch.futures.Future``. Tensors in the arguments must not be changed until the
    future is complete. Otherwise as ``rpc_sync``.
    """
    agent = current.agent or current.require()
    rank, invoke = agent.workers.rank_of(to), agent.calls.invoke_async
    if torch_profiler._is_profiler_enabled:
        invoke = _record_calls(invoke, "async", func, agent.workers, rank)
    future = invoke(rank, func, args, kwargs, timeout)
    waited_for = getattr(_thread_local_var, "future_list", None)
    if waited_for is not None:
        waited_for.append(future)
    return future


@untraced
def remote(
    to: Destination,
    func: Callable[..., object],
    args: Iterable[object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> rref.RRef[Any]:
    """Call ``func(*args, **kwargs)`` on worker ``to``, and return a reference to the result.

    The result stays on ``to``. Does not block: errors, a timeout included, are raised at the first
    use of the reference.
    """
    agent = current.require()
    rank, create = agent.workers.rank_of(to), _create
    if torch_profiler._is_profiler_enabled:
        create = _record_calls(create, "remote", func, agent.workers, rank)
    return create(agent, rank, func, args, kwargs, timeout)


def _record_calls(
    call: Callable[P, T], kind: str, function: object, workers: Workers, to: int
) -> Callable[P, T]:
    """Wrap a function that makes calls, so that each call is an event of the calling thread.

    The event, ``rpc_sync#function(worker0 -> worker1)``, ends with the result in ``rpc_sync``, and
    in ``rpc_async`` and ``remote`` when the request is sent. The callee's work is in the callee's
    own profile. torch's own RPC records these events only in its old profiler
    (``torch.autograd.profiler_legacy``).

    Args:
        call: Makes a call.
        kind: ``"sync"``, ``"async"`` or ``"remote"``.
        function: The function to call.
        workers: All workers.
        to: The callee's rank.

    Source: names in torch/distributed/rpc/internal.py, _build_rpc_profiling_key.
    """
    event = f"rpc_{kind}#{_profiled_name(function)}({workers.me.name} -> {workers.infos[to].name})"

    def call_recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C._profiler._RecordFunctionFast(event):
            return call(*args, **kwargs)

    return call_recorded


def _profiled_name(function: object) -> str:
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    builtin = torch.jit._builtins._find_builtin(function)
    return builtin or getattr(function, "__qualname__", None) or type(function).__qualname__


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the worker of a name; this worker if None."""
    agent = current.require()
    workers = agent.workers
    return workers.me if worker_name is None else workers.infos[workers.rank_of(worker_name)]


@contextlib.contextmanager
def wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for this thread's calls of ``rpc_async`` within the block.

    The first error is raised at once; other calls may still be pending.
    """
    before = getattr(_thread_local_var, "future_list", None)
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures = _thread_local_var.future_list
        if before is None:
            del _thread_local_var.future_list
        else:
            _thread_local_var.future_list = before
        if futures:
            wait_for_all(futures, current.require().polling.wait)


_wait_all = wait_all


def get_rpc_timeout() -> float:
    """Return the timeout of calls without a timeout of their own, in seconds."""
    return current.require().calls.rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    current.require().calls.rpc_timeout = seconds(timeout)


def _get_current_rpc_agent() -> Agent:
    return current.require()


def _is_current_rpc_agent_set() -> bool:
    return current.agent is not None


def enable_gil_profiling(flag: bool) -> None:
    """Measure the time for which handlers wait for the GIL: ``agent.gil_average_wait_time_us``."""
    current.require().gil_waits = [] if flag else None


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return counters of references, with torch's names."""
    agent = current.require()
    entries, forks = agent.references.store.counts()
    creations = str(agent.calls.creations())
    return {
        "num_owner_rrefs": str(entries),
        "num_pending_users": creations,
        "num_pending_futures": creations,
        # No message of the protocol is confirmed (``rref_store``).
        "num_pending_children": "0",
        "num_forks": str(forks),
    }


def _get_debug_info() -> dict[str, str]:
    """Return all counters, with torch's names."""
    info = _rref_context_get_debug_info() | current.require().get_debug_info()
    engine = interceptor.engine
    return info | engine.debug_info() if engine is not None else info


_all_gather, _barrier = worker_gather.all_gather, worker_gather.barrier  # torch's names


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    current.require().quiescence.wait(_deadline(timeout))


def _deadline(timeout: float) -> float:
    """Return the time (``time.monotonic``) at which a timeout is over; infinite for 0."""
    timeout_s = seconds(timeout)
    return time.monotonic() + timeout_s if timeout_s > 0 else math.inf


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Delete all references to other workers' values."""
    current.require().references.delete_users()


def _refuse_leaks(agent: Agent, leaks: Sequence[Entry]) -> None:
    if leaks and not _ignore_rref_leak:
        names = ", ".join(repr(rref.owner_rref(agent, entry)) for entry in leaks[:8])
        raise MpidistError(
            f"Leaking RRef: {len(leaks)} reference(s) to values of {agent.workers.me} are still "
            f"held by others at shutdown: {names}"
        )


def _refuse_in_child() -> None:
    if current.agent is not None:
        current.agent.refuse_fork()
        current.agent = None
        current.absence = FORKED


os.register_at_fork(after_in_child=_refuse_in_child)


__all__ = [
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
