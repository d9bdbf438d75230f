"""Difference between the calls of a group's ranks: the first number at which they are not one call.

MPI matches the collectives of a communicator by their order alone. Where two ranks call different
ones, some ranks may return and go on, so that the report comes from a later call, or the rank has
exited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpidist.comm.execution.op_status import Call, History
from mpidist.comm.mpi import rank_ranges

# Operations whose first tensor has one size and dtype on all ranks.
_ONE_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor"})


def first(histories: Mapping[int, History]) -> tuple[int, dict[int, Call]] | None:
    """Return the first number at which ranks have called different collectives, and their calls.

    Args:
        histories: By the rank in the group.
    """
    known = {rank: history for rank, history in histories.items() if history.calls}
    numbers = {
        number
        for history in known.values()
        for number in range(history.sequence - len(history.calls) + 1, history.sequence + 1)
    }
    for number in sorted(numbers):
        calls = {rank: call for rank in known if (call := known[rank].call(number)) is not None}
        if len(set(map(_matched, calls.values()))) > 1:
            return number, calls
    return None


def are_different(history: History, number: int, call: Call | None) -> bool:
    """Return whether a rank has called another collective than ``call`` at a number."""
    other = history.call(number)
    return other is not None and call is not None and other.operation != call.operation


def sentence(calls: Mapping[int, Call]) -> str:
    """Return ``rank 1 called broadcast where rank 0 called all_reduce``.

    What most ranks called comes last, that of the lowest rank among equals.
    """
    holders: dict[object, list[int]] = {}
    for rank in sorted(calls):
        holders.setdefault(_matched(calls[rank]), []).append(rank)
    # Sorting is stable: the first of the longest is that of the lowest rank.
    usual, *others = sorted(holders.values(), key=len, reverse=True)
    is_named_alike = len({call.operation for call in calls.values()}) == 1

    def called(ranks: Sequence[int]) -> str:
        call = calls[ranks[0]]
        what = str(call) if is_named_alike else call.operation
        return f"{rank_ranges.named(ranks)} called {what}"

    return f"{', '.join(map(called, sorted(others)))} where {called(usual)}"


def _matched(call: Call) -> object:
    if call.operation not in _ONE_SIZE or call.shape is None:
        return call.operation
    return call.operation, math.prod(call.shape), call.dtype
