"""``MPIDIST_TRACE``: file of a timeline of the whole program (pure).

Unset or empty: none. Its begin is collective, so all ranks must have it: ``world`` compares them
when MPI starts, and raises an error on all ranks if some have it and some do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpidist.comm.mpi import rank_ranges

ENV_TRACE = "MPIDIST_TRACE"


def file() -> str:
    """Return the file of the trace; empty without one."""
    return os.environ.get(ENV_TRACE, "").strip()


def problem(are_on: Sequence[int]) -> str | None:
    """Return the error in all ranks' settings, in rank order; None if all or none are on."""
    missing = [rank for rank, is_on in enumerate(are_on) if not is_on]
    if not missing or len(missing) == len(are_on):
        return None
    return f"{ENV_TRACE} is not set on {rank_ranges.named(missing)}; set it on all ranks or on none"
