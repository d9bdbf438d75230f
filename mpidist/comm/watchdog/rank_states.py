"""States of a group's ranks in a report (pure): ranks in one state are one entry of a large job's.

Up to eight ranks stand one by one, in their order, each with its process. Of more ranks, those in
the same operations at the same lines of the program share an entry, and the state with the fewest
ranks comes first: the rank that the others wait for. Where that leaves more than eight states,
ranks in the same operations share an entry wherever they stand in the program, and at last only
eight entries are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpidist.comm.execution.op_status import Entry
from mpidist.comm.mpi import rank_ranges
from mpidist.comm.mpi.world import Process

_MOST = 8  # ranks that stand one by one, and entries of a larger group
_WIDTH = 100  # of a line
_LONGEST = 300  # of another rank's words


@dataclass(frozen=True)
class RankState:
    """State of a rank.

    Attributes:
        rank: In the group of the report.
        world_rank: In the world.
        words: What is known of a rank without operations.
        process: None of a rank that has ended.
        entries: Its operations.
        places: Lines on its threads.
    """

    rank: int
    world_rank: int
    words: str = ""
    process: Process | None = None
    entries: tuple[Entry, ...] = ()
    places: tuple[str, ...] = ()

    def operations(self) -> object:
        """Return what ranks in the same operations have alike."""
        # Times and queues differ between ranks that wait for one another.
        alike = tuple(
            replace(entry, seconds=None if entry.seconds is None else 0.0, queued=0)
            for entry in self.entries
        )
        return self.words, alike, self.process is None

    def operations_and_lines(self) -> object:
        """Return what ranks in the same operations at the same lines have alike."""
        return self.operations(), tuple(map(_users_place, self.places))


class Listing(NamedTuple):
    """Lines of a report, and the ranks whose processes they name."""

    lines: list[str]
    ranks: tuple[int, ...]


def listing(states: Sequence[RankState]) -> Listing:
    """Return the lines on all ranks, with equal states of more than eight ranks folded."""
    if len(states) <= _MOST:
        shared = [[state] for state in states]
    else:
        shared = _shared(states, RankState.operations_and_lines)
        if len(shared) > _MOST:
            shared = _shared(states, RankState.operations)
    # Sorting is stable: of states with as many ranks that of the lowest rank comes first.
    # The state of most ranks is listed in any case: it is what the others miss.
    shown = shared if len(shared) <= _MOST else [*shared[: _MOST - 1], shared[-1]]
    lines = [line for alike in shown for line in _lines(alike)]
    if len(shown) < len(shared):
        hidden = [state.rank for alike in shared[_MOST - 1 : -1] for state in alike]
        lines.append(f"  {rank_ranges.named(hidden)}: in {len(shared) - _MOST} other states")
    named = tuple(alike[0].rank for alike in shown if alike[0].process is not None)
    return Listing(lines, named)


def safe(text: str) -> str:
    """Return another rank's words as one line that a terminal prints."""
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return "".join(char if char.isprintable() else "?" for char in text)


def _shared(
    states: Sequence[RankState], key: Callable[[RankState], object]
) -> list[list[RankState]]:
    """Return the states by their keys, the key of the fewest ranks first."""
    alike: dict[object, list[RankState]] = {}
    for state in states:
        alike.setdefault(key(state), []).append(state)
    return sorted(alike.values(), key=len)


def _lines(alike: Sequence[RankState]) -> list[str]:
    """Return the lines on ranks in the same operations."""
    first, label = alike[0], _label(alike)
    operations = zip(*(state.entries for state in alike), strict=True)
    lines = [f"{label}: {safe(_operation(entries))}" for entries in operations]
    lines = lines or [f"{label}: {first.words}"]
    if first.process is None:
        return lines
    where = f"    {_processes(alike)}{first.process.pid} on {first.process.host}"
    if not first.places:
        return [*lines, where]
    main, *others = map(safe, first.places)
    lines += _folded(f"{where}, {main}")
    for place in others:
        lines += _folded(f"    {place}")
    return lines


def _label(alike: Sequence[RankState]) -> str:
    ranks, world_ranks = zip(*((state.rank, state.world_rank) for state in alike), strict=True)
    label = f"  {rank_ranges.named(ranks)}"
    if ranks == world_ranks:
        return label
    return f"{label} ({rank_ranges.named(world_ranks, 'world rank')})"


def _operation(entries: Sequence[Entry]) -> str:
    """Return the text of an operation that several ranks are in, by the rank longest in it."""
    longest = max(entries, key=lambda entry: entry.seconds or 0.0)
    texts = set(map(str, entries))
    return str(longest) + (" at most" if len(texts) > 1 else "")


def _processes(alike: Sequence[RankState]) -> str:
    """Return the words before the process of the first of these ranks."""
    if len(alike) == 1:
        return "process "
    hosts = {state.process.host for state in alike if state.process is not None}
    places = {tuple(map(_users_place, state.places)) for state in alike}
    at = f" at {len(places)} places" if len(places) > 1 else ""
    on = f"on {len(hosts)} hosts" if len(hosts) > 1 else f"on {hosts.pop()}"
    return f"{len(alike)} processes {on}{at}; the first is "


def _users_place(place: str) -> str:
    """Return the line of the user's program in ``thread: place, within place``."""
    return place.partition(": ")[2].partition(", within ")[0]


def _folded(line: str) -> list[str]:
    """Return ``thread: place, within place`` as lines of at most 100 columns, if the paths fit."""
    head, colon, rest = line.partition(": ")
    users, comma, inner = rest.partition(", within ")
    lines, last = [], head + colon.rstrip()
    for part in filter(None, (f" {users}", f"{comma}{inner}")):
        if len(last) + len(part) <= _WIDTH:
            last += part
        else:
            lines.append(last)
            last = f"      {part.lstrip(', ')}"
    return [*lines, last]
