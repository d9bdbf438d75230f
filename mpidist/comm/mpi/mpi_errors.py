"""From MPI's error codes to typed errors; and for the threads that serve all ranks, how to go on when one of them is dead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mpidist.comm.mpi.library import MPI
from mpidist.errors import MpidistError, RankFailureError

_NEWS_S = 1.0


def is_mpi_error(error: BaseException) -> bool:
    """Say whether MPI raised it."""
    return isinstance(error, MPI.Exception)


def translate(error: Any, where: str) -> MpidistError:
    """Turn an ``MPI.Exception`` into one of ours.

    Args:
        error: What an MPI call raised.
        where: Rank, group and operation, for the message.

    Returns:
        RankFailureError where MPI says that a process died or the communicator was revoked, else
        MpidistError.
    """
    text = f"{where}: {error.Get_error_string()}"
    return RankFailureError(text) if is_failure(error) else MpidistError(text)


def failed_ranks(mpi: Any, world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the world ranks that MPI knows to be dead in a communicator; empty without ULFM.

    Blocks: up to 1 s while none is known. A survivor that revoked the communicator can be faster
    than the news of the death.
    """
    deadline = time.monotonic() + _NEWS_S
    while True:
        dead = known_dead(mpi, world_ranks)
        if dead is None:
            return ()
        if dead or time.monotonic() > deadline:
            return dead
        time.sleep(1e-2)


def known_dead(mpi: Any, world_ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the world ranks of a communicator's members that MPI knows to be dead by now; None without ULFM."""
    try:
        dead = mpi.Get_failed()
        places = MPI.Group.Translate_ranks(dead, list(range(dead.Get_size())), mpi.Get_group())
    except Exception:  # MPI without ULFM: NotImplementedError, or MPI's own error
        return None
    return tuple(world_ranks[place] for place in places if 0 <= place < len(world_ranks))


@contextlib.contextmanager
def death_tolerated() -> Iterator[None]:
    """Let a call to a dead rank pass without effect: whoever waits for that rank learns of it by its own call."""
    try:
        yield
    except Exception as error:
        if not is_mpi_error(error) or not is_failure(error):
            raise


def matched_probe(mpi: Any, tag: int, status: Any) -> Any:
    """Look for a message of any living rank: ``Improbe`` that goes on after a death (ULFM), or None."""
    try:
        return mpi.Improbe(MPI.ANY_SOURCE, tag, status)
    except Exception as error:
        if not is_mpi_error(error) or not is_failure(error):
            raise
        # MPI refuses any-source receives until somebody has taken note of the dead.
        mpi.Ack_failed()
        return None


def is_pending(error: Any) -> bool:
    """Say whether the receive that raised this is still posted: it is from any source, and one has died (ULFM)."""
    return is_failure(error) and error.Get_error_class() == getattr(
        MPI, "ERR_PROC_FAILED_PENDING", None
    )


def acknowledged_deaths(mpi: Any) -> set[int]:
    """Return the ranks of a communicator that MPI knows to be dead; receives from any source go on from here (ULFM)."""
    mpi.Ack_failed()
    dead = mpi.Get_failed()
    return set(MPI.Group.Translate_ranks(dead, list(range(dead.Get_size())), mpi.Get_group()))


def is_over(request: Any) -> bool:
    """Test a request; one whose peer has died is over, too."""
    try:
        return bool(request.Test())
    except Exception as error:
        if not is_mpi_error(error) or not is_failure(error):
            raise
        return True


def is_failure(error: Any) -> bool:
    """Say whether an error of MPI means that a process died, or that the communicator was revoked."""
    # The names exist in mpi4py for every MPI; their values are distinct only where the library has
    # ULFM.
    kind = error.Get_error_class()
    failures = {
        getattr(MPI, name, None)
        for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    }
    return kind in failures and kind != MPI.ERR_UNKNOWN
