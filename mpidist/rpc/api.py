"""What users call: ``init_rpc``, ``rpc_sync``, ``rpc_async``, ``remote``, ``shutdown``; torch's names and meanings."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mpidist.comm import group as groups
from mpidist.comm import launch, runtime
from mpidist.comm.group import ProcessGroup
from mpidist.comm.mailbox import Mailbox
from mpidist.errors import MpidistError
from mpidist.rpc import current, gathering, interceptor, quiescence, rref
from mpidist.rpc.agent import Agent
from mpidist.rpc.allowed import Allowed
from mpidist.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from mpidist.rpc.dispatch import HANDLERS
from mpidist.rpc.options import BackendType, RpcBackendOptions, seconds
from mpidist.rpc.worker import WorkerInfo, check_name, doubled

_ignore_rref_leak = True  # torch's switch: False makes ``shutdown`` raise for references that nobody deleted
_thread_local_var = threading.local()

# A communicator serves all agents of the same ranks, one after the other; each has its generation.
_mailboxes: dict[tuple[int, ...], Mailbox] = {}
_generations: dict[tuple[int, ...], int] = {}
_lock = threading.Lock()


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    group: ProcessGroup | None = None,
    allowed: Sequence[Any] | None = None,
) -> None:
    """Make this process a worker that can call others and be called.

    Collective: over all ranks of the job, or of ``group``; with ``world_size`` 1, over nobody. No port is opened, and only these
    ranks are heard.

    Args:
        name: This worker's, unique among them: letters, digits, ``-``, ``_`` and ``:``.
        backend: None, or a member of ``BackendType``; MPI carries the messages either way.
        rank: -1, or this process's rank in the group: MPI knows it.
        world_size: None, or the number of ranks. Fewer than the job has: the first so many, and ``mpidist.comm.init()`` must have
            been called on all ranks before.
        rpc_backend_options: Timeouts, threads, device maps.
        group: The ranks that take part; the job's if None.
        allowed: What others may call here: names (``"module"``, ``"module.function"``, ``"torch.add"``), functions, classes or
            modules; anything if None. Whatever else a message names is refused before it is made. The list guards against
            mistakes and does not hold against a hostile worker, which can still run arbitrary code here (SECURITY.md).

    Raises:
        TypeError: Arguments of a wrong kind.
        MpidistError: RPC is initialised already; a name that two workers have (all ranks); ranks that MPI does not know.
    """
    options = _options(backend, rpc_backend_options)
    check_name(name)
    made_allowed = Allowed(allowed) if allowed is not None else None
    if current.agent is not None:
        raise MpidistError("RPC is already initialized: call mpidist.rpc.shutdown() first")
    mailbox, generation = _mailbox(rank, world_size, group)
    workers, device_maps = _workers(mailbox, name, generation, options)
    agent = Agent(mailbox, generation, workers, device_maps, options, made_allowed, rref.adopt, HANDLERS)
    current.agent = agent  # first: the others may call as soon as it starts
    agent.start()


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End RPC on this worker; ``init_rpc`` may be called again.

    Collective: if ``graceful``, over all workers.

    Blocks: if ``graceful``, until all workers have called it and nothing is under way between them, calls that handlers still
    make included. Other calls are answered meanwhile. Else it tells the others that this worker has left, and returns; their
    calls to it fail.

    Args:
        graceful: Wait for the others.
        timeout: Seconds to wait; 0 for no end.

    Raises:
        CommTimeout: Others were late. RPC is ended on this worker all the same.
        MpidistError: References were left over, and ``api._ignore_rref_leak`` is False.
    """
    agent = current.require()
    try:
        if graceful:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            quiescence.wait_for_quiet(agent, timeout)
            # All are here: nobody needs to be told that this worker leaves.
            leaks = agent.store.leaks()
            agent.stop()
            _refuse_leaks(agent, leaks)
    finally:
        agent.leave()
        current.agent = None


def rpc_sync(to: Any, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Call ``func(*args, **kwargs)`` on worker ``to`` and return its result.

    Tensors of any layout go along; references, arrays and whatever can be pickled, too. Functions go by name.

    Args:
        to: A name, a rank or a WorkerInfo.
        func: A function, class, builtin operator of torch or script function.
        timeout: Seconds; 0 for no end, and if not given the options'.

    Raises:
        CommTimeout: No answer in time (a ``RuntimeError`` and a ``TimeoutError``).
        RankFailureError: The worker has left.
        Exception: What ``func`` raised, with the remote traceback as its cause; RemoteError if that cannot be rebuilt here.
    """
    agent = current.require()
    return agent.invoke(agent.rank_of(to), func, args, kwargs, timeout)


def rpc_async(to: Any, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Call ``func(*args, **kwargs)`` on worker ``to``; return a ``torch.futures.Future`` of its result.

    Tensors must stay unchanged until the future is complete. Otherwise as ``rpc_sync``.
    """
    agent = current.require()
    future = agent.invoke_async(agent.rank_of(to), func, args, kwargs, timeout)
    waited_for = getattr(_thread_local_var, "future_list", None)
    if waited_for is not None:
        waited_for.append(future)
    return future


def remote(
    to: Any, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> rref.RRef[Any]:
    """Call ``func(*args, **kwargs)`` on worker ``to``; return a reference to its result, which stays there.

    Returns at once. What goes wrong, a timeout included, is raised at the reference's first use.
    """
    agent = current.require()
    return rref.create(agent, agent.rank_of(to), func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return a worker by name; this one if None."""
    agent = current.require()
    return agent.me if worker_name is None else agent.worker(agent.rank_of(worker_name))


@contextlib.contextmanager
def wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for all calls of ``rpc_async`` that this thread made in it; raise the first error."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures = _thread_local_var.future_list
        del _thread_local_var.future_list
        for future in futures:
            future.wait()


_wait_all = wait_all


def get_rpc_timeout() -> float:
    """Return the seconds after which a call fails that names no timeout."""
    return current.require().rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    current.require().rpc_timeout = seconds(timeout)


def enable_gil_profiling(flag: bool) -> None:
    """Have the threads that answer measure how long they wait for Python's lock: ``agent.gil_average_wait_time_us``."""
    current.require().gil_waits = [] if flag else None


def _get_current_rpc_agent() -> Agent:
    return current.require()


def _is_current_rpc_agent_set() -> bool:
    return current.agent is not None


def _all_gather(obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    return gathering.all_gather(obj, worker_names, timeout)


def _barrier(worker_names: Iterable[str]) -> None:
    gathering.barrier(worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    quiescence.wait_for_quiet(current.require(), timeout)


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Drop all references to other workers' values."""
    for user in list(current.require().users):
        user.delete()


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return counters of references, with torch's names."""
    agent = current.require()
    entries, forks = agent.store.counts()
    return {
        "num_owner_rrefs": str(entries),
        "num_pending_users": str(len(agent.creations)),
        "num_pending_futures": str(len(agent.creations)),
        "num_pending_children": "0",  # nothing is confirmed: see rref_store
        "num_forks": str(forks),
    }


def _get_debug_info() -> dict[str, str]:
    """Return all counters, with torch's names."""
    info = _rref_context_get_debug_info() | current.require().get_debug_info()
    engine = interceptor.registered()
    return info | engine.debug_info() if engine is not None else info


def _refuse_leaks(agent: Agent, leaks: Sequence[Any]) -> None:
    if leaks and not _ignore_rref_leak:
        names = ", ".join(repr(rref.owned(agent, entry)) for entry in leaks[:8])
        raise MpidistError(
            f"Leaking RRef: {len(leaks)} reference(s) to values of {agent.me} are still held by others at shutdown: {names}"
        )


def _options(backend: Any, options: Any) -> RpcBackendOptions:
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType: leave it out, or give BackendType.MPI")
    if options is None:
        return RpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Could not infer backend for options. Argument rpc_backend_options must be an instance of RpcBackendOptions of "
            f"mpidist.rpc; got {type(options)}"
        )
    return options


def _mailbox(rank: int, world_size: int | None, group: ProcessGroup | None) -> tuple[Mailbox, int]:
    """Return what carries the letters, and how many agents it has served."""
    if world_size == 1 and group is None:
        if rank not in (-1, 0):
            raise MpidistError(f"rank {rank} is not one of the 1 worker that world_size=1 announces")
        key: tuple[int, ...] = ()
    else:
        group = group or _group(world_size)
        key = group.world_ranks
        if rank not in (-1, group.rank):
            raise MpidistError(
                f"init_rpc was given rank {rank}, but MPI has started this process as rank {group.rank}; leave it out"
            )
        if world_size not in (None, group.size):
            raise MpidistError(f"init_rpc was given world_size {world_size}, but the group has {group.size} ranks; leave it out")
    with _lock:
        mailbox = _mailboxes.get(key)
        if mailbox is None:
            mailbox = _mailboxes[key] = Mailbox(group.clone("rpc") if group is not None else None)
        _generations[key] = _generations.get(key, 0) + 1
        return mailbox, _generations[key]


def _group(world_size: int | None) -> ProcessGroup:
    if not runtime.is_initialized() and world_size is not None:
        told = launch.from_environment(os.environ).size
        if told is not None and told != world_size:
            raise MpidistError(
                f"init_rpc was given world_size {world_size}, but the job has {told} ranks; for fewer, call mpidist.comm.init() "
                "on all ranks first, or give group="
            )
    world = groups.init()
    if world_size is None or world_size == world.size:
        return world
    if not 1 < world_size < world.size:
        raise MpidistError(f"init_rpc was given world_size {world_size}, but the job has {world.size} ranks; leave it out")
    made = _groups.get(world_size)
    if made is None:
        made = world.new_group(range(world_size), f"rpc-{world_size}")
        if made is None:
            raise MpidistError(f"rank {world.rank} is not among the first {world_size} ranks of the job")
        _groups[world_size] = made
    return made


_groups: dict[int, ProcessGroup] = {}


def _workers(
    mailbox: Mailbox, name: str, generation: int, options: RpcBackendOptions
) -> tuple[list[WorkerInfo], list[dict[str, dict[int, int]]]]:
    """Tell all workers of this one; return all, and where they send tensors of their devices."""
    mine = (name, generation, options.device_maps)
    told = mailbox.group.all_gather_object(mine) if mailbox.group is not None else [mine]
    workers = [WorkerInfo(told_name, rank) for rank, (told_name, _, _) in enumerate(told)]
    twice = doubled(workers)
    if twice:
        raise MpidistError(
            f"RPC worker name is not unique: {', '.join(map(repr, twice))} among {[worker.name for worker in workers]}"
        )
    counts = {count for _, count, _ in told}
    if len(counts) > 1:
        raise MpidistError(
            f"ranks have initialised RPC a different number of times: {sorted(counts)}; a rank has missed an init_rpc"
        )
    unknown = sorted({worker for _, _, maps in told for worker in maps} - {worker.name for worker in workers})
    if unknown:
        raise MpidistError(f"device maps name workers that there are not: {unknown}; the workers are {workers}")
    return workers, [maps for _, _, maps in told]


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
