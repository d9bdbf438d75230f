"""One object from each of some workers to all of them, by calls: a leader collects and tells the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpidist.comm import departures
from mpidist.errors import MpidistError
from mpidist.rpc import current, services
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent

_LOOK_S = 0.1  # between two looks at who has ended
logger = logging.getLogger("mpidist.rpc")


class _State:
    """One gathering.

    Attributes:
        gathered: By worker name.
        proceed: Set when all are there.
    """

    def __init__(self) -> None:
        self.gathered: dict[str, Any] = {}
        self.proceed = threading.Event()


_lock = threading.RLock()
_counts: dict[tuple[int, str], int] = {}  # by agent, and the names of those who gather: they count alike
_states: dict[str, _State] = {}


def _state(sequence_id: str) -> _State:
    with _lock:
        return _states.setdefault(sequence_id, _State())


@services.service
def gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str]) -> None:
    """Take a worker's part; run by the leader."""
    _require(type(sequence_id) is str and type(worker_name) is str and type(worker_names) is set)
    _require(all(type(name) is str for name in worker_names))
    state = _state(sequence_id)
    with _lock:
        if worker_name in state.gathered:
            raise MpidistError(f"{worker_name} has given its part of gathering {sequence_id} already")
        state.gathered[worker_name] = obj
        if set(state.gathered) == set(worker_names):
            state.proceed.set()


@services.service
def tell_follower(sequence_id: str, gathered: dict[str, Any]) -> None:
    """Take all parts; run by each worker but the leader."""
    _require(type(sequence_id) is str and type(gathered) is dict)
    state = _state(sequence_id)
    state.gathered = gathered
    state.proceed.set()


def _require(is_right: bool) -> None:
    if not is_right:
        raise TypeError("a part of a gathering is none")


def all_gather(obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Return each worker's object by its name.

    Collective: over the named workers; None for all.

    Raises:
        MpidistError: A worker was late.
        RankFailureError: A worker came to the end of its program, or has left RPC.
    """
    agent = current.require()
    names = set(worker_names) if worker_names else {worker.name for worker in agent.get_worker_infos()}
    leader, me = min(names), agent.workers.me.name
    joined = " ".join(sorted(names))
    with _lock:
        # Each agent counts anew: one that a worker has missed, and ended with RPC, must not part them for ever.
        if any(generation != agent.generation for generation, _ in _counts):
            _counts.clear()
        number = _counts.get((agent.generation, joined), 0)
        _counts[agent.generation, joined] = number + 1
    sequence_id = f"{agent.generation}:{number}:{joined}"
    limit = agent.calls.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
    if me == leader:
        gather_to_leader(sequence_id, me, obj, names)
    else:
        agent.calls.invoke(agent.workers.rank_of(leader), gather_to_leader, (sequence_id, me, obj, names), {}, timeout)
    state = _state(sequence_id)
    deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
    while not state.proceed.wait(_LOOK_S):
        missing = names - {me} - set(state.gathered)
        if time.monotonic() > deadline:
            raise MpidistError(f"{me} timed out in _all_gather after {limit:.2f} seconds: {sorted(missing)} missing")
        _require_present(agent, me, missing, leader)
    if me == leader:
        _tell_followers(names - {leader}, sequence_id, state.gathered, timeout, limit)
    with _lock:
        _states.pop(sequence_id, None)
    return state.gathered


def _require_present(agent: Agent, me: str, missing: set[str], leader: str) -> None:
    ranks = {agent.workers.rank_of(name) for name in missing}
    # Who leaves RPC may have had the answer that is still on its way here; only the leader leaves after all have it.
    gone = agent.workers.left & (ranks if me == leader else {agent.workers.rank_of(leader)})
    ended = departures.ended([agent.workers.world_ranks[rank] for rank in sorted(ranks)])
    if gone or ended:
        lost = sorted({agent.workers.world_ranks[rank] for rank in gone} | set(ended))
        raise departures.failure(f"{agent.workers.me}: _all_gather", lost)


def _tell_followers(followers: set[str], sequence_id: str, gathered: Any, timeout: float, limit: float) -> None:
    agent = current.require()
    told = {
        name: agent.calls.invoke_async(agent.workers.rank_of(name), tell_follower, (sequence_id, gathered), {}, timeout)
        for name in sorted(followers)
    }
    errors = []
    for name, future in told.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise MpidistError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {limit:.2f} seconds. "
            f"The first exception is {errors[0][1]}"
        )


def barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of the named workers have called this; a failure is logged, as torch does."""
    try:
        all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")
