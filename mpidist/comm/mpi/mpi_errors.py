"""Typed errors for MPI's error codes, and MPI calls that survive the death of a rank (ULFM)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from mpidist.comm.mpi import agreement_lock, backoff, exited_ranks, rank_ranges
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MatchedMessage, Mpi, Request
from mpidist.errors import MpidistError, RankFailureError

_NEWS_S = 1.0
_SLEEP_S = 1e-3
# Open MPI looks for events, which bring the news of a death, in one of so many calls.
_CALLS_OF_LOOK = 8


def is_mpi_error(error: BaseException) -> TypeGuard[MPI.Exception]:
    """Return whether MPI raised it."""
    return isinstance(error, MPI.Exception)


def translate(error: MPI.Exception, where: str) -> MpidistError:
    """Return the typed error for an ``MPI.Exception``.

    Args:
        error: The exception of an MPI call.
        where: Rank, group and operation, for the message.

    Returns:
        RankFailureError if a process died or the communicator was revoked, else MpidistError.
    """
    text = f"{where}: {error.Get_error_string()}"
    if error.Get_error_class() == MPI.ERR_TRUNCATE or "truncat" in text.lower():
        # MPICH's calls within the call, which are in the traceback: MPI's exception is the cause.
        text = text.partition(", error stack:")[0]
        text += (
            "; the ranks' tensors differ in size, or they called different collectives: with "
            "MPIDIST_DEBUG=1 all ranks compare before they communicate, and of this run "
            "'mpidist report' says who called what"
        )
    return RankFailureError(text) if is_failure(error) else MpidistError(text)


def explain(error: MPI.Exception, where: str, mpi: Mpi, world_ranks: Sequence[int]) -> MpidistError:
    """Return the typed error of a call on a communicator; a RankFailureError names the dead ranks.

    Blocks: up to 1 s while MPI knows of no dead rank.

    Args:
        error: The exception of an MPI call.
        where: Rank, group and operation, for the message.
        mpi: The communicator.
        world_ranks: Of its ranks.
    """
    explained = translate(error, where)
    if may_hide_death(error) and failed_ranks(mpi, world_ranks):
        explained = RankFailureError(str(explained))
    if isinstance(explained, RankFailureError):
        # Another rank may have revoked the group because of a rank that has ended normally, which
        # MPI does not count as failed.
        dead = exited_ranks.among(world_ranks)
        if not dead:
            dead = failed_ranks(mpi, world_ranks)
            # Before the watchdog does: this rank's next call already refuses.
            for rank in dead:
                exited_ranks.record_death(rank)
        if dead:
            names = rank_ranges.numbers(dead)
            explained = RankFailureError(f"{explained}; world ranks that failed: {names}", dead)
    return explained


def failed_ranks(mpi: Mpi, world_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the world ranks that MPI knows to be dead in a communicator; empty without ULFM.

    Blocks: up to 1 s while no dead rank is known. A survivor may revoke the communicator before
    this rank's MPI is informed of the death.
    """
    dead: tuple[int, ...] | None = ()

    def is_known() -> bool:
        nonlocal dead
        dead = known_dead(mpi, world_ranks)
        return dead is None or bool(dead)

    backoff.until(is_known, timeout_s=_NEWS_S, sleep_s=_SLEEP_S)
    return dead or ()


def known_dead(mpi: Mpi, world_ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the world ranks of a communicator that MPI knows to be dead now; None without ULFM.

    Makes progress, without which MPI does not hear of a death.
    """
    _make_progress()
    try:
        places = _failed_places(mpi)
    except Exception:  # MPI without ULFM: NotImplementedError, or MPI's own error
        return None
    return tuple(world_ranks[place] for place in places if 0 <= place < len(world_ranks))


def _make_progress() -> None:
    # A call on a revoked communicator returns before it makes any.
    with agreement_lock.lock:
        for _ in range(_CALLS_OF_LOOK):
            MPI.COMM_SELF.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def _failed_places(mpi: Mpi) -> Sequence[int]:
    """Return the ranks of a communicator that MPI knows to be dead, in its own numbers."""
    dead = mpi.Get_failed()
    size = dead.Get_size()
    if not size:
        _free(dead)
        return ()
    everyone = mpi.Get_group()
    try:
        return MPI.Group.Translate_ranks(dead, list(range(size)), everyone)
    finally:
        _free(dead)
        _free(everyone)


def _free(group: MPI.Group) -> None:
    # The watchdog asks ten times a second, and mpi4py frees no group by itself.
    if group != MPI.GROUP_EMPTY:
        group.Free()


@contextlib.contextmanager
def death_tolerated() -> Iterator[None]:
    """Ignore the error of a call to a dead rank: each wait for that rank raises its own."""
    try:
        yield
    except Exception as error:
        if not is_mpi_error(error) or not is_failure(error):
            raise


def matched_probe(mpi: Mpi, tag: int, status: MPI.Status) -> MPI.Message | MatchedMessage | None:
    """Return a message from any rank by ``Improbe``, or None.

    After a death (ULFM), messages of living ranks are still found.
    """
    try:
        with agreement_lock.lock:
            return mpi.Improbe(MPI.ANY_SOURCE, tag, status)
    except Exception as error:
        if not is_mpi_error(error) or not is_failure(error):
            raise
        # MPI refuses any-source receives until the failures are acknowledged.
        mpi.Ack_failed()
        return None


def is_pending(error: MPI.Exception) -> bool:
    """Return whether the failed receive is still posted: from any source, after a death (ULFM)."""
    return is_failure(error) and error.Get_error_class() == getattr(
        MPI, "ERR_PROC_FAILED_PENDING", None
    )


def acknowledged_deaths(mpi: Mpi) -> set[int]:
    """Acknowledge failures, so that any-source receives go on (ULFM); return the dead ranks."""
    mpi.Ack_failed()
    return set(_failed_places(mpi))


def is_over(request: Request) -> bool:
    """Test a request; one that has failed, or whose peer has died, counts as complete."""
    try:
        with agreement_lock.lock:
            return bool(request.Test())
    except MpidistError:  # of a request that this library makes
        return True
    except Exception as error:
        if not is_mpi_error(error) or not is_failure(error):
            raise
        return True


def may_hide_death(error: MPI.Exception) -> bool:
    """Return whether an error of another class may come of a death in the middle of a collective.

    Open MPI's collectives of several messages return the class of the request that failed, or none.
    """
    return error.Get_error_class() in (
        MPI.ERR_OTHER,
        MPI.ERR_IN_STATUS,
        MPI.ERR_INTERN,
        MPI.ERR_UNKNOWN,
    )


def is_failure(error: MPI.Exception) -> bool:
    """Return whether an MPI error means that a process died or the communicator was revoked."""
    # mpi4py has the names for every MPI; their values are distinct only in libraries with ULFM.
    kind = error.Get_error_class()
    failures = {
        getattr(MPI, name, None)
        for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    }
    return kind in failures and kind != MPI.ERR_UNKNOWN
