"""Worlds of a job (pure): which of its recordings belong together, and which are of the past.

A process's recording is that of the last world that it has entered. Ranks are numbers within a
world, so recordings of two worlds never stand side by side: each program of a coupled job is a
world, and the ranks that go on after a death are another one than they were with the dead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mpidist.comm.mpi import rank_ranges
from mpidist.comm.recorder.recording import Recording

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


class Worlds(NamedTuple):
    """Recordings of a job by their worlds.

    Attributes:
        current: By the key of the world and by world rank.
        past: A line on the ranks of each other world.
    """

    current: dict[str, dict[int, Recording]]
    past: list[str]


def of(
    recordings: Iterable[Recording],
    is_alive: Callable[[Recording], bool] = lambda each: each.is_alive,
) -> Worlds:
    """Return the recordings of a job by their worlds.

    A world without a living process is past if another process has left it for a later one; and if
    all its recordings were begun before a process of the job was: it is of an earlier start, as no
    process joins a world before all processes of its start have begun.

    Args:
        recordings: In the order of their ranks.
        is_alive: Whether the process of a recording runs on this node.
    """
    by_world: dict[str, dict[int, Recording]] = {}
    left: set[str] = set()
    starts_ns: dict[str, int] = {}
    for each in recordings:
        by_world.setdefault(each.worlds[-1], {})[each.rank] = each
        left.update(each.worlds[:-1])
        # Ticks count on while a node is suspended, and the monotonic clock stands.
        start_ns = min(each.started_ticks * _TICK_NS, each.started_monotonic_ns)
        starts_ns[each.host] = max(start_ns, starts_ns.get(each.host, 0))
    found = Worlds({}, [])
    for world, members in by_world.items():
        is_earlier = all(
            each.started_monotonic_ns < starts_ns[each.host] for each in members.values()
        )
        if not (world in left or is_earlier) or any(map(is_alive, members.values())):
            found.current[world] = members
            continue
        ranks = f"{rank_ranges.named(tuple(members))} of {next(iter(members.values())).size}"
        start = "start" if is_earlier else "world of the job"
        found.past.append(f"{ranks}, of an earlier {start}")
    return found
