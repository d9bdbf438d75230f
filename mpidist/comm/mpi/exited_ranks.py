"""Ranks whose program has ended or died: recorded by the watchdog, read by waits for these ranks.

MPI's own error of a wait for a dead rank (ULFM) may be missing: a test of a long message whose
transfer was under way may stay false for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from mpidist.comm.mpi import rank_ranges, runtime
from mpidist.errors import RankFailureError

# Messages that a rank sent before its end may still arrive for this long.
GRACE_S = 2.0

_exit_times: dict[int, float] = {}  # by world rank
_dead: set[int] = set()


def _forget() -> None:
    _exit_times.clear()
    _dead.clear()


runtime.belongs_to_world(_forget)


def record(world_rank: int) -> None:
    """Record that a rank's program has ended."""
    _exit_times.setdefault(world_rank, time.monotonic())


def record_death(world_rank: int) -> None:
    """Record that MPI has reported a rank as dead (ULFM)."""
    _dead.add(world_rank)
    record(world_rank)


def record_end_of_world() -> None:
    """Record that the ranks of the world are about to leave it: no wait for one of them goes on."""
    world = runtime.world()
    for rank in range(world.size):
        if rank != world.rank:
            _exit_times[rank] = -math.inf


def have_died(world_ranks: Sequence[int]) -> bool:
    """Return whether one of these ranks is recorded as dead."""
    return not _dead.isdisjoint(world_ranks)


def among(world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return those of these ranks whose program has ended."""
    return tuple(rank for rank in world_ranks if rank in _exit_times)


def ended(world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return those of these ranks whose program ended more than ``GRACE_S`` ago.

    None of their messages is in flight.
    """
    if not _exit_times:
        return ()
    now = time.monotonic()
    return tuple(rank for rank in among(world_ranks) if now - _exit_times[rank] > GRACE_S)


def all_ended(world_ranks: Sequence[int]) -> bool:
    """Return whether all these programs ended more than ``GRACE_S`` ago; False for no ranks."""
    return bool(_exit_times) and bool(world_ranks) and len(ended(world_ranks)) == len(world_ranks)


def failure(where: str, world_ranks: Sequence[int]) -> RankFailureError:
    """Return the error of a wait for ended ranks; ``where``: rank, group and operation."""
    names = rank_ranges.named(world_ranks, "world rank")
    end = "died" if have_died(world_ranks) else "exited"
    return RankFailureError(f"{where} waits for {names}, which {end}", world_ranks)
