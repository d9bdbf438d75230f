"""``MPIDIST_DETERMINISTIC``: whether sums have the same bits on other nodes, or ranks (pure).

``order``: contributions are added in the order of the ranks, whatever the nodes, the size and the
algorithm. ``exact``: so they are, and mpidist's DDP averages gradients exactly, with the same bits
on any number of ranks. Unset or ``0``: MPI and the algorithms of this library choose the order. The
setting must be the same on all ranks: ``world`` compares it when MPI starts, and raises an error on
all ranks if ranks differ or a value is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

ENV_DETERMINISTIC = "MPIDIST_DETERMINISTIC"
# Numbers, because ranks compare them.
ANY, ORDER, EXACT, UNREADABLE = range(4)
_CODES = {"": ANY, "0": ANY, "order": ORDER, "exact": EXACT}
_WORDS = ("unset or '0'", "'order'", "'exact'", "another word")


def code() -> int:
    """Return this process's setting as a number: ``ANY``, ``ORDER``, ``EXACT``, ``UNREADABLE``."""
    return _CODES.get(os.environ.get(ENV_DETERMINISTIC, ""), UNREADABLE)


def is_exact() -> bool:
    """Return whether DDP averages exactly, where its caller does not say it."""
    return code() == EXACT


def problem(codes: Sequence[int]) -> str | None:
    """Return the error in all ranks' settings, in rank order; None if equal and readable."""
    if set(codes) in ({ANY}, {ORDER}, {EXACT}):
        return None
    values = ", ".join(f"{_WORDS[code]} on rank {codes.index(code)}" for code in sorted(set(codes)))
    return (
        f"{ENV_DETERMINISTIC} must be 'order', 'exact', '0' or unset, the same on all ranks; it is "
        f"{values}"
    )
