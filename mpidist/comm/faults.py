"""From MPI's error codes to typed errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.comm.library import MPI
from mpidist.errors import MpidistError, RankFailureError


def is_mpi_error(error: BaseException) -> bool:
    """Say whether MPI raised it."""
    return isinstance(error, MPI.Exception)


def translate(error: Any, where: str) -> MpidistError:
    """Turn an ``MPI.Exception`` into one of ours.

    Args:
        error: What an MPI call raised.
        where: Rank, group and operation, for the message.

    Returns:
        RankFailureError where MPI says that a process died or the communicator was revoked, else MpidistError.
    """
    kind = error.Get_error_class()
    text = f"{where}: {error.Get_error_string()}"
    # The names exist in mpi4py for every MPI; their values are distinct only where the library has ULFM.
    failures = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")}
    if kind in failures and kind != MPI.ERR_UNKNOWN:
        return RankFailureError(text)
    return MpidistError(text)


def failed_ranks(mpi: Any, world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the world ranks that MPI knows to be dead in a communicator; empty without ULFM."""
    try:
        dead = mpi.Get_failed()
        places = MPI.Group.Translate_ranks(dead, list(range(dead.Get_size())), mpi.Get_group())
    except Exception:  # MPI without ULFM
        return ()
    return tuple(world_ranks[place] for place in places if 0 <= place < len(world_ranks))
