"""Collectives of a job's recordings (pure): ranks that have not come, and calls that differ.

MPI matches the collectives of a group by their order alone, so those with one number on a group are
one call, or a mistake of the program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mpidist.comm.recorder.recording import Entry, Kind, Recording
from mpidist.comm.watchdog.last_operations import form

Call = tuple[str, int]  # a group's key and a number

# Operations whose first tensor has one size and dtype on all ranks.
_ONE_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor"})


@dataclass(frozen=True)
class Late:
    """A collective that ranks are in.

    Attributes:
        group: Label of its group on one of these ranks.
        sequence: Its number on the group.
        inside: Entries under way, by world rank.
        missing: World ranks of the group that have not come to it.
        unknown: World ranks of the group without a recording.
        forgotten: World ranks of the group that may have come to it: their recordings no longer
            hold what they called then.
    """

    group: str
    sequence: int
    inside: Mapping[int, Entry]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    forgotten: tuple[int, ...] = ()


@dataclass(frozen=True)
class Difference:
    """The first number of a group at which ranks have called different collectives.

    Attributes:
        group: Label of the group on one of these ranks.
        sequence: The number.
        calls: Entries by world rank.
        is_order: The ranks have called the same two collectives in another order.
    """

    group: str
    sequence: int
    calls: Mapping[int, Entry]
    is_order: bool = False


def late(recordings: Mapping[int, Recording]) -> list[Late]:
    """Return the collectives under way, the one that has begun first on each rank first."""
    last: dict[str, dict[int, Entry]] = {}
    inside: dict[Call, dict[int, Entry]] = {}
    for rank, recording in recordings.items():
        keys = recording.keys
        for entry in recording.entries:
            if entry.kind is not Kind.COLLECTIVE:
                continue
            key = keys.get(entry.group, entry.group)
            last.setdefault(key, {})[rank] = entry
            if entry.end_ns is None:
                inside.setdefault((key, entry.sequence), {})[rank] = entry
    found = []
    for (key, sequence), entries in inside.items():
        rank, entry = next(iter(entries.items()))
        members = recordings[rank].groups.get(entry.group, ())
        unknown = tuple(rank for rank in members if rank not in recordings)
        missing: list[int] = []
        forgotten: list[int] = []
        for rank in members:
            seen = last[key].get(rank)
            if rank in recordings and (seen is None or seen.sequence < sequence):
                is_known = _holds_since(recordings[rank], seen)
                (missing if is_known else forgotten).append(rank)
        found.append(
            Late(entry.group, sequence, entries, tuple(missing), unknown, tuple(forgotten))
        )
    # An operation that issues others begins before them.
    return sorted(found, key=lambda one: (-len(one.missing), one.sequence))


def differences(recordings: Mapping[int, Recording]) -> list[Difference]:
    """Return the first difference of each group that has one."""
    first: dict[Call, Entry] = {}
    differing: dict[str, int] = {}
    for recording in recordings.values():
        keys = recording.keys
        for entry in recording.entries:
            if entry.kind is not Kind.COLLECTIVE:
                continue
            call = keys.get(entry.group, entry.group), entry.sequence
            other = first.setdefault(call, entry)
            if other is not entry and _differ(other, entry):
                differing[call[0]] = min(call[1], differing.get(call[0], call[1]))
    found = []
    for call in differing.items():
        calls, key = _calls(recordings, *call), call[0]
        following = _calls(recordings, key, call[1] + 1)
        found.append(
            Difference(first[call].group, call[1], calls, _is_other_order(calls, following))
        )
    return found


def follows(late: Late, difference: Difference) -> bool:
    """Return whether a collective is that of a difference, or a later one of the same group."""
    calls = difference.calls
    return difference.sequence <= late.sequence and any(
        rank in calls and calls[rank].group == entry.group for rank, entry in late.inside.items()
    )


def sentence(difference: Difference) -> list[tuple[tuple[int, ...], str]]:
    """Return the ranks of each call and the call in words; what most ranks called comes last."""
    calls = difference.calls
    is_named_alike = len({entry.operation for entry in calls.values()}) == 1
    holders: dict[object, list[int]] = {}
    for rank in sorted(calls):
        holders.setdefault(_matched(calls[rank]), []).append(rank)
    # Sorting is stable: the last of equals is that of the lowest rank.
    ordered = sorted(holders.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [
        (tuple(ranks), form(calls[ranks[0]]) if is_named_alike else calls[ranks[0]].operation)
        for ranks in ordered
    ]


def _holds_since(recording: Recording, entry: Entry | None) -> bool:
    """Return whether a recording holds all entries behind one; behind its begin if None."""
    return not recording.overwritten or (entry is not None and entry.number >= recording.oldest)


def _differ(one: Entry, other: Entry) -> bool:
    if one.operation != other.operation:
        return True
    if one.shape == other.shape and one.dtype == other.dtype:
        return False
    return _matched(one) != _matched(other)


def _matched(entry: Entry) -> object:
    """Return what MPI takes as one call: the operation, and the size where it has one."""
    if entry.operation not in _ONE_SIZE or not entry.dtype:
        return entry.operation
    return entry.operation, math.prod(entry.shape), entry.dtype


def _calls(recordings: Mapping[int, Recording], key: str, sequence: int) -> dict[int, Entry]:
    """Return the collective of a number on the group of a key, by world rank."""
    return {
        rank: entry
        for rank, recording in recordings.items()
        for entry in recording.entries
        if entry.kind is Kind.COLLECTIVE
        and entry.sequence == sequence
        and recording.keys.get(entry.group, entry.group) == key
    }


def _is_other_order(calls: Mapping[int, Entry], following: Mapping[int, Entry]) -> bool:
    """Return whether ranks have called the same two collectives in turn, some in another order.

    A rank that waits in its first call has no other one. A rank that has gone on has called next
    what the others called first: any other call is no other order, but another program.
    """
    firsts = frozenset(map(_matched, calls.values()))
    pairs = {
        frozenset({_matched(calls[rank]), _matched(following[rank])})
        for rank in calls
        if rank in following
    }
    return len(firsts) == 2 and pairs == {firsts}
