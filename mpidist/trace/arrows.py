"""Arrows between the slices of ranks: who waits for whom.

* a message: the send's begin to the receive's end. Messages of one sender, receiver, group and tag
  do not overtake (MPI-4.1 §3.5), so the k-th send is that of the k-th receive, of tensors and of
  objects; a receive from any source whose sender is not known takes the oldest send that is left.
* a call: its begin to the handler's begin, and the handler's end to the call's end.
* a collective: the begin of its last rank to the ends of all others, as soon as all members are in.

Slices come rank by rank. What has no other side within the trace, or whose rank is missing, has no
arrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from mpidist.comm.recorder.recording import Kind
from mpidist.trace.events import Slice, Spot, spot_of_begin, spot_of_end


class Group(NamedTuple):
    """A group.

    Attributes:
        key: The same on all its ranks.
        members: World ranks.
    """

    key: str = ""
    members: tuple[int, ...] = ()


class Arrow(NamedTuple):
    """An arrow.

    Attributes:
        name: ``message``, ``call``, ``answer`` or ``last``.
        tail: Begin of the arrow.
        head: Its end.
    """

    name: str
    tail: Spot
    head: Spot


class _Side(NamedTuple):
    begin: Spot
    end: Spot
    size_bytes: int


_Channel = tuple[Group, int, bool]  # with the tag, and whether objects are sent


class Arrows:
    """Sides of arrows, as they are found.

    Args:
        error_ns: Bound of the clocks' error: a receive does not end earlier before its send.
    """

    def __init__(self, error_ns: int) -> None:
        self._error_ns = error_ns
        # By sender, receiver and channel.
        self._sends: defaultdict[tuple[int, int, _Channel], list[_Side]] = defaultdict(list)
        self._receives: defaultdict[tuple[int, int, _Channel], list[_Side]] = defaultdict(list)
        self._any_receives: defaultdict[tuple[int, _Channel], list[_Side]] = defaultdict(list)
        # By caller, callee and the call's number.
        self._calls: dict[tuple[int, int, int], _Side] = {}
        self._handlers: dict[tuple[int, int, int], _Side] = {}
        # By group and number within it, then by rank.
        self._collectives: dict[tuple[Group, int], dict[int, _Side]] = {}
        self._drawn: set[tuple[Group, int]] = set()

    def add(self, rank: int, placed: Slice, group: Group) -> Iterator[Arrow]:
        """Take a slice; yield the arrows that it completes.

        Args:
            rank: World rank of the slice.
            placed: The slice.
            group: Its group.
        """
        entry = placed.entry
        kind = entry.kind
        if kind is Kind.COLLECTIVE:
            if entry.sequence and len(group.members) > 1:
                side = _Side(spot_of_begin(rank, placed), spot_of_end(rank, placed), 0)
                key = (group, entry.sequence)
                # What a collective executes in turn may have its number, and comes behind it.
                if key in self._drawn:
                    return
                sides = self._collectives.setdefault(key, {})
                sides.setdefault(rank, side)
                if len(sides) == len(group.members):
                    self._drawn.add(key)
                    yield from _from_last(list(self._collectives.pop(key).values()))
            return
        if kind not in _PAIRED:
            return
        side = _Side(spot_of_begin(rank, placed), spot_of_end(rank, placed), entry.size_bytes)
        channel = (group, entry.tag, entry.operation.endswith("_object"))
        if kind is Kind.SEND:
            self._sends[rank, entry.peer, channel].append(side)
        elif kind is Kind.RECEIVE and entry.peer >= 0:
            self._receives[entry.peer, rank, channel].append(side)
        elif kind is Kind.RECEIVE:
            self._any_receives[rank, channel].append(side)
        elif kind is Kind.CALL:
            self._calls[rank, entry.peer, entry.tag] = side
        else:
            self._handlers[entry.peer, rank, entry.tag] = side

    def rest(self) -> Iterator[Arrow]:
        """Yield the arrows that are known when all ranks are in: messages and calls."""
        for key, handler in self._handlers.items():
            call = self._calls.get(key)
            if call is not None:
                yield Arrow("call", call.begin, handler.begin)
                yield Arrow("answer", handler.end, call.end)
        left: defaultdict[tuple[int, _Channel], list[_Side]] = defaultdict(list)
        for (sender, receiver, channel), sends in self._sends.items():
            receives = self._receives.get((sender, receiver, channel), [])
            yield from self._paired(sends, receives, left[receiver, channel])
        for place, receives in self._any_receives.items():
            sends = sorted(left[place], key=lambda side: side.begin.time_ns)
            yield from self._paired(sends, receives, [])

    def _paired(
        self, sends: list[_Side], receives: list[_Side], left: list[_Side]
    ) -> Iterator[Arrow]:
        """Yield the arrows of a channel; append the sends without a receive to ``left``."""
        rest = iter(receives)
        for number, send in enumerate(sends):
            # A receive that has ended before belongs to a send before the trace.
            for receive in rest:
                if receive.end.time_ns + self._error_ns >= send.begin.time_ns:
                    yield Arrow("message", send.begin, receive.end)
                    break
            else:
                left += sends[number:]
                return


_PAIRED = (Kind.SEND, Kind.RECEIVE, Kind.CALL, Kind.HANDLER)


def _from_last(sides: list[_Side]) -> Iterator[Arrow]:
    last = max(sides, key=lambda side: side.begin.time_ns)
    for side in sides:
        if side is not last:
            yield Arrow("last", last.begin, side.end)
