"""Which ranks have come to the end of their program: written by the watchdog, asked by whoever waits for one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

GRACE_S = 2.0  # what a rank sent before its end may still be under way for this long

_left: dict[int, float] = {}  # world rank: when its word came


def note(world_rank: int) -> None:
    """Note that a rank has come to its end."""
    _left.setdefault(world_rank, time.monotonic())


def among(world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return which of these ranks have come to their end."""
    return tuple(rank for rank in world_ranks if rank in _left)


def have_left(world_ranks: Sequence[int]) -> bool:
    """Say whether all of these ranks came to their end at least ``GRACE_S`` ago; False for none at all."""
    if not _left or not world_ranks:
        return False
    now = time.monotonic()
    return all(rank in _left and now - _left[rank] > GRACE_S for rank in world_ranks)
