"""``MPIDIST_DETERMINISTIC``: whether sums have the same bits on other nodes, or ranks.

``order``: contributions are added in the order of the ranks, whatever the nodes, the size and the
algorithm. ``exact``: so they are, and mpidist's DDP averages gradients exactly, with the same bits
on any number of ranks. Unset or ``0``: MPI and the algorithms of this library choose the order. The
setting must be the same on all ranks: ``world`` compares it when MPI starts, and raises an error on
all ranks if ranks differ or a value is unknown.
"""

from __future__ import annotations

from mpidist.comm.mpi.word_setting import WordSetting

ENV_DETERMINISTIC = "MPIDIST_DETERMINISTIC"
ANY, ORDER, EXACT, UNREADABLE = range(4)
SETTING = WordSetting(
    ENV_DETERMINISTIC,
    {"": ANY, "0": ANY, "order": ORDER, "exact": EXACT},
    ("unset or '0'", "'order'", "'exact'"),
    "'order', 'exact', '0' or unset",
)


def is_exact() -> bool:
    """Return whether DDP averages exactly, where its caller does not say it."""
    return SETTING.code() == EXACT
