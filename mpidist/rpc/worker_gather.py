"""All-gather over some workers, by calls: each worker sends its object to every other."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from mpidist.comm.mpi import exited_ranks
from mpidist.errors import CommTimeout, MpidistError, RankFailureError
from mpidist.rpc import current
from mpidist.rpc.constants import UNSET_RPC_TIMEOUT
from mpidist.rpc.names import services
from mpidist.rpc.options import seconds
from mpidist.rpc.threads.log import logger

if TYPE_CHECKING:
    from mpidist.rpc.agent import Agent

_CHECK_S = 0.1  # between two checks for ended ranks
# Gatherings for which a worker keeps another's object before it has called all_gather itself.
_AHEAD = 64

_changed = threading.Condition()
# Gatherings so far, by the workers' names in order: equal on all these workers.
_counts: dict[tuple[str, ...], int] = {}
# Key: the names, and the number of the gathering. Value: objects by worker name.
_parts: dict[tuple[tuple[str, ...], int], dict[str, object]] = {}


def reset() -> None:
    """Clear the counts and objects of an agent that ends."""
    with _changed:
        _counts.clear()
        _parts.clear()


class _Absence:
    """Reason for which a worker has no object, in the place of its object."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


@services.service("the transfer of an object of _all_gather")
def put_part(
    source: int,
    /,
    generation: int,
    number: int,
    names: tuple[str, ...],
    obj: object,
    absence: str | None = None,
) -> None:
    """Store a worker's object, or why it has none; runs on each other worker of a gathering.

    Raises:
        MpidistError: The sender or this worker takes no part, the sender is too far ahead or has
            sent its object already, or this worker has given up.
    """
    if not (
        type(generation) is type(number) is int
        and type(names) is tuple
        and all(type(name) is str for name in names)
        and (absence is None or type(absence) is str)
    ):
        raise TypeError("a part of a gathering is none")
    with _changed:
        # Under the lock, or else an object could remain after ``reset``.
        agent = current.require()
        me, sender = agent.workers.me.name, agent.workers.infos[source].name
        _require(
            generation == agent.generation,
            f"it is of init_rpc {generation}; this is {agent.generation}",
        )
        _require(list(names) == sorted(set(names)), "its names are not in order")
        _require(me in names, f"{me} takes no part")
        _require(sender in names, f"its sender {sender} takes no part")
        for name in names:
            agent.workers.rank_of(name)
        count = _counts.get(names, 0)
        parts = _parts.get((names, number))
        if parts is None:
            _require(number >= count, f"{me} has given up")
            ahead = sum(
                [
                    sender in others and other >= _counts.get(among, 0)
                    for (among, other), others in _parts.items()
                ]
            )
            _require(
                number < count + _AHEAD and ahead < _AHEAD, f"{sender} is too far ahead of {me}"
            )
            parts = _parts[names, number] = {}
        # What could be sent to this worker but not to another one has no value.
        _require(sender not in parts or absence is not None, f"{sender} has given its part already")
        parts[sender] = obj if absence is None else _Absence(absence)
        _changed.notify_all()


def _require(is_right: bool, reason: str) -> None:
    if not is_right:
        raise MpidistError(f"a message of a gathering is refused: {reason}")


def all_gather(
    obj: object, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gather one object from each worker.

    Collective: over the named workers; None for all. Each of them sends each other one its object,
    or the reason for which it cannot: an object that cannot be sent is an error of all.

    Blocks: until all objects are there, and all workers have this one's; at most ``timeout``
        seconds. By default, as in torch, without a limit for workers that come late, and at most
        the RPC timeout for the answers of the others.

    Returns:
        The objects by worker name.

    Raises:
        MpidistError: A worker has not sent its object in time, cannot send it, or has given up; or
            this worker is not among those named, or RPC has ended here.
        RankFailureError: A worker's program has ended, or it has left RPC.
        Exception: This worker's object cannot be sent.
    """
    agent = current.require()
    limit_s = 0.0 if timeout == UNSET_RPC_TIMEOUT else seconds(timeout)
    deadline = time.monotonic() + limit_s if limit_s > 0 else math.inf
    me = agent.workers.me.name
    names = tuple(sorted(set(worker_names or [worker.name for worker in agent.get_worker_infos()])))
    if me not in names:
        raise MpidistError(f"{me} takes no part in an _all_gather of {list(names)}, which it calls")
    others = [agent.workers.rank_of(name) for name in names if name != me]
    with _changed:
        number = _counts.get(names, 0)
        _counts[names] = number + 1
        parts = _parts.setdefault((names, number), {})
        parts[me] = obj
    try:
        errors = _send_part(agent, others, (agent.generation, number, names, obj), timeout)
        _require_parts(parts)
        if errors:
            # First of a worker that has ended: because of it the others give up.
            first = min(errors, key=lambda error: not isinstance(error, RankFailureError))
            if isinstance(first, CommTimeout):
                raise _late(
                    me,
                    agent.calls.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else limit_s,
                    str(first),
                )
            raise first
        while True:
            left_s = deadline - time.monotonic()
            with _changed:
                is_whole = _changed.wait_for(
                    lambda: len(parts) == len(names) or _absent(parts), min(left_s, _CHECK_S)
                )
                missing = set(names) - parts.keys()
            _require_parts(parts)
            if is_whole:
                return parts
            if left_s <= _CHECK_S:
                raise _late(me, limit_s, f"{sorted(missing)} missing")
            _require_present(agent, missing)
    finally:
        with _changed:
            _parts.pop((names, number), None)


def _send_part(
    agent: Agent, others: Sequence[int], arguments: tuple[Any, ...], timeout: float
) -> list[MpidistError]:
    """Send this worker's object to the others; return what their answers have raised.

    Raises:
        Exception: The object cannot be sent; the others have been told.
    """
    calls = agent.calls
    try:
        # First, so that what one of them cannot be sent is sent to none.
        for to in others:
            calls.require_sendable(to, put_part, arguments)
        answers = [calls.invoke_async(to, put_part, arguments, {}, timeout) for to in others]
    except BaseException as error:
        told = (*arguments[:-1], None, "".join(traceback.format_exception_only(error)).strip())
        for to in others:
            with contextlib.suppress(MpidistError):
                calls.invoke_async(to, put_part, told, {}, timeout)
        raise
    errors = []
    for answer in answers:
        try:
            answer.wait()
        except MpidistError as error:
            errors.append(error)
    return errors


def _absent(parts: Mapping[str, object]) -> list[tuple[str, _Absence]]:
    return [(name, part) for name, part in parts.items() if isinstance(part, _Absence)]


def _require_parts(parts: Mapping[str, object]) -> None:
    """Raise if a worker has sent a reason in place of its object."""
    with _changed:
        absent = _absent(parts)
    if absent:
        name, absence = absent[0]
        raise MpidistError(f"{name} cannot send its object for _all_gather: {absence.reason}")


def _late(me: str, limit_s: float, reason: str) -> MpidistError:
    return MpidistError(f"{me} timed out in _all_gather after {limit_s:.2f} seconds: {reason}")


def _require_present(agent: Agent, names: Set[str]) -> None:
    workers = agent.workers
    if agent.calls.is_stopped:
        raise MpidistError(
            f"{workers.me}: {agent.calls.stop_reason} before the parts of {sorted(names)} came for "
            "_all_gather"
        )
    ranks = {workers.rank_of(name) for name in names}
    ended = exited_ranks.ended([workers.world_ranks[rank] for rank in sorted(ranks)])
    if lost := sorted({*ended, *(workers.world_ranks[rank] for rank in workers.left & ranks)}):
        raise exited_ranks.failure(f"{workers.me}: _all_gather", lost)


def barrier(worker_names: Iterable[str]) -> None:
    """Wait until all named workers have called this; log a failure, as torch does."""
    try:
        all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")
