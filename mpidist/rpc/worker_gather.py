"""All-gather over some workers, by calls: a leader collects the objects and broadcasts them."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidist.comm.mpi import exited_ranks
from mpidist.errors import MpidistError
from mpidist.rpc import current
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.names import services

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent

_CHECK_S = 0.1  # between two checks for ended ranks
# Gatherings for which a worker may send its part before the leader has called all_gather.
_AHEAD = 64
# Generation of the agent, number of the gathering, and the names in order.
_SEQUENCE_ID = re.compile(r"([0-9]{1,18}):([0-9]{1,18}):([A-Za-z0-9\-_: ]+)")
logger = logging.getLogger("mpidist.rpc")


class _State:
    """State of one gathering.

    Attributes:
        gathered: Objects by worker name.
        proceed: Set when all objects are there.
        is_called: This worker has called ``all_gather``; False if only others have.
    """

    def __init__(self) -> None:
        self.gathered: dict[str, object] = {}
        self.proceed = threading.Event()
        self.is_called = False


class _Identity(NamedTuple):
    """A parsed sequence id.

    Attributes:
        number: The number of the gathering among these workers.
        joined: The workers' names in order, as one string.
        names: The workers' names.
    """

    number: int
    joined: str
    names: frozenset[str]


_lock = threading.RLock()
# Gatherings so far, by the agent's generation and the workers' names: equal on all these workers.
_counts: dict[tuple[int, str], int] = {}
_states: dict[str, _State] = {}  # by sequence id


def reset() -> None:
    """Clear the counts and states of an agent that ends."""
    with _lock:
        _counts.clear()
        _states.clear()


@services.service
def gather_to_leader(
    source: int, /, sequence_id: str, worker_name: str, obj: object, worker_names: set[str]
) -> None:
    """Store a worker's object; runs on the leader.

    Raises:
        MpidistError: The object is not the sender's own, this worker is not the leader, or the
            sender is too far ahead or has sent its object already.
    """
    _require_types(
        type(sequence_id) is str and type(worker_name) is str and type(worker_names) is set
    )
    _require_types(all(type(name) is str for name in worker_names))
    with _lock:
        # Under the lock, or else a state could remain after ``reset``.
        agent = current.require()
        number, joined, names = identity = _identity(agent, sequence_id)
        sender = _sender(agent, source, identity)
        _require(worker_name == sender, f"a part of {worker_name!r} comes from {sender}")
        _require(worker_names == names, "its names are others")
        _require(agent.workers.me.name == min(names), f"{agent.workers.me.name} does not lead it")
        state = _states.get(sequence_id)
        if state is None:
            count = _counts.get((agent.generation, joined), 0)
            if number < count:
                return  # this worker has given up
            ahead = sum(
                [not other.is_called and sender in other.gathered for other in _states.values()]
            )
            _require(
                number < count + _AHEAD and ahead < _AHEAD,
                f"{sender} is too far ahead of {agent.workers.me.name}",
            )
            state = _states[sequence_id] = _State()
        _require(worker_name not in state.gathered, f"{worker_name} has given its part already")
        state.gathered[worker_name] = obj
        if state.gathered.keys() == names:
            state.proceed.set()


@services.service
def broadcast_to_follower(source: int, /, sequence_id: str, gathered: dict[str, object]) -> None:
    """Store all objects; runs on each worker except the leader.

    Raises:
        MpidistError: The sender is not the leader, this worker has not sent its object, or the
            names do not match.
    """
    _require_types(type(sequence_id) is str and type(gathered) is dict)
    with _lock:
        # Under the lock, or else a state could remain after ``reset``.
        agent = current.require()
        number, joined, names = identity = _identity(agent, sequence_id)
        sender, leader = _sender(agent, source, identity), min(names)
        _require(
            sender == leader != agent.workers.me.name,
            f"{sender} does not lead it, but {leader} does",
        )
        _require(gathered.keys() == names, "its parts are of others")
        _require(
            number < _counts.get((agent.generation, joined), 0),
            f"{agent.workers.me.name} has not given its part",
        )
        state = _states.get(sequence_id)
        if state is None:
            return  # this worker has given up
        _require(not state.proceed.is_set(), "all parts are here already")
        state.gathered = gathered
        state.proceed.set()


def _require_types(is_right: bool) -> None:
    if not is_right:
        raise TypeError("a part of a gathering is none")


def _require(is_right: bool, reason: str) -> None:
    if not is_right:
        raise MpidistError(f"a message of a gathering is refused: {reason}")


def _identity(agent: Agent, sequence_id: str) -> _Identity:
    """Parse a sequence id, and check that it names this worker."""
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    if match is None:
        raise MpidistError(
            f"a message of a gathering is refused: {sequence_id[:80]!r} is no sequence id"
        )
    generation, number, joined = match.groups()
    _require(
        generation == str(agent.generation),
        f"it is of init_rpc {generation}; this is {agent.generation}",
    )
    names = joined.split(" ")
    _require(names == sorted(set(names)), "its names are not in order")
    _require(agent.workers.me.name in names, f"{agent.workers.me.name} takes no part")
    for name in names:
        agent.workers.rank_of(name)
    return _Identity(int(number), joined, frozenset(names))


def _sender(agent: Agent, source: int, identity: _Identity) -> str:
    name = agent.workers.infos[source].name
    _require(name in identity.names, f"its sender {name} takes no part")
    return name


def all_gather(
    obj: object, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gather one object from each worker.

    Collective: over the named workers; None for all.

    Blocks: until all objects are there, at most the timeout.

    Returns:
        The objects by worker name.

    Raises:
        MpidistError: A worker has not sent its object in time.
        RankFailureError: A worker's program has ended, or it has left RPC.
    """
    agent = current.require()
    names = (
        set(worker_names) if worker_names else {worker.name for worker in agent.get_worker_infos()}
    )
    joined = " ".join(sorted(names))
    with _lock:
        # Counts restart with each agent, so that a gathering which one worker has missed before
        # shutdown does not shift the numbers afterwards.
        if any(generation != agent.generation for generation, _ in _counts):
            _counts.clear()
        number = _counts.get((agent.generation, joined), 0)
        _counts[agent.generation, joined] = number + 1
        sequence_id = f"{agent.generation}:{number}:{joined}"
        state = _states.setdefault(sequence_id, _State())
        state.is_called = True
    try:
        return _run_gather(agent, state, sequence_id, obj, names, timeout)
    finally:
        with _lock:
            _states.pop(sequence_id, None)


def _run_gather(
    agent: Agent, state: _State, sequence_id: str, obj: object, names: set[str], timeout: float
) -> dict[str, Any]:
    leader, me = min(names), agent.workers.me.name
    limit = agent.calls.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
    if me == leader:
        gather_to_leader(agent.workers.me.id, sequence_id, me, obj, names)
    else:
        agent.calls.invoke(
            agent.workers.rank_of(leader),
            gather_to_leader,
            (sequence_id, me, obj, names),
            {},
            timeout,
        )
    deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
    while not state.proceed.wait(_CHECK_S):
        missing = names - {me} - set(state.gathered)
        if time.monotonic() > deadline:
            raise MpidistError(
                f"{me} timed out in _all_gather after {limit:.2f} seconds: {sorted(missing)} "
                "missing"
            )
        _require_present(agent, me, missing, leader)
    if me == leader:
        _broadcast_to_followers(names - {leader}, sequence_id, state.gathered, timeout, limit)
    return state.gathered


def _require_present(agent: Agent, me: str, missing: set[str], leader: str) -> None:
    ranks = {agent.workers.rank_of(name) for name in missing}
    # A follower that has left may have received the answer before this worker. The leader leaves
    # only after all workers have it.
    gone = agent.workers.left & (ranks if me == leader else {agent.workers.rank_of(leader)})
    ended = exited_ranks.ended([agent.workers.world_ranks[rank] for rank in sorted(ranks)])
    if gone or ended:
        lost = sorted({agent.workers.world_ranks[rank] for rank in gone} | set(ended))
        raise exited_ranks.failure(f"{agent.workers.me}: _all_gather", lost)


def _broadcast_to_followers(
    followers: set[str], sequence_id: str, gathered: object, timeout: float, limit: float
) -> None:
    agent = current.require()
    answers = {
        name: agent.calls.invoke_async(
            agent.workers.rank_of(name), broadcast_to_follower, (sequence_id, gathered), {}, timeout
        )
        for name in sorted(followers)
    }
    errors = []
    for name, future in answers.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise MpidistError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {limit:.2f} "
            f"seconds. The first exception is {errors[0][1]}"
        )


def barrier(worker_names: Iterable[str]) -> None:
    """Wait until all named workers have called this; log a failure, as torch does."""
    try:
        all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")
