"""Ranks that have come to the end of their program: noted by the watchdog, read by every wait that may be for one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpidist.errors import RankFailureError

GRACE_S = 2.0  # what a rank sent before its end may still be under way for this long

_left: dict[int, float] = {}  # world rank: when its word came


def note(world_rank: int) -> None:
    """Note that a rank has come to its end."""
    _left.setdefault(world_rank, time.monotonic())


def among(world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return which of these ranks have come to their end."""
    return tuple(rank for rank in world_ranks if rank in _left)


def ended(world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return which of these ranks came to their end at least ``GRACE_S`` ago: nothing of theirs is under way any more."""
    if not _left:
        return ()
    now = time.monotonic()
    return tuple(rank for rank in world_ranks if rank in _left and now - _left[rank] > GRACE_S)


def have_left(world_ranks: Sequence[int]) -> bool:
    """Say whether all of these ranks came to their end at least ``GRACE_S`` ago; False for none at all."""
    return bool(_left) and bool(world_ranks) and len(ended(world_ranks)) == len(world_ranks)


def failure(what: str, world_ranks: Sequence[int]) -> RankFailureError:
    """Return the error of a wait for ranks that have ended; ``what`` names the rank, the group and the operation."""
    plural = "s" if len(world_ranks) > 1 else ""
    names = ", ".join(map(str, world_ranks))
    return RankFailureError(
        f"{what} waits for world rank{plural} {names}, which came to the end of the program",
        world_ranks,
    )
