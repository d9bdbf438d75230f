"""``MPIDIST_DETERMINISTIC``: whether sums have the same bits on any nodes (pure).

``order``: contributions are added in the order of the ranks, whatever the nodes, the size and the
algorithm. Unset or ``0``: MPI and the algorithms of this library choose the order. The setting must
be the same on all ranks: ``world`` compares it when MPI starts, and raises an error on all ranks if
ranks differ or a value is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

ENV_DETERMINISTIC = "MPIDIST_DETERMINISTIC"
# Numbers, because ranks compare them.
ANY, ORDER, UNREADABLE = range(3)
_CODES = {"": ANY, "0": ANY, "order": ORDER}
_WORDS = ("unset or '0'", "'order'", "another word")


def code() -> int:
    """Return this process's setting as a number: ``ANY``, ``ORDER`` or ``UNREADABLE``."""
    return _CODES.get(os.environ.get(ENV_DETERMINISTIC, ""), UNREADABLE)


def problem(codes: Sequence[int]) -> str | None:
    """Return the error in all ranks' settings, in rank order; None if equal and readable."""
    if set(codes) in ({ANY}, {ORDER}):
        return None
    values = ", ".join(f"{_WORDS[code]} on rank {codes.index(code)}" for code in sorted(set(codes)))
    return (
        f"{ENV_DETERMINISTIC} must be 'order', '0' or unset, the same on all ranks; it is {values}"
    )
