"""A group's failure: why it is of no use any more, and what a caller sees of an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpidist.comm.mpi import exited_ranks, mpi_errors, nonblocking, runtime
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.errors import DisagreementError, GroupError, MpidistError, RankFailureError

ABORT, RAISE = "abort", "raise"  # what a timeout does: end the job, or raise in the caller


class Failing:
    """The part of a process group that may fail.

    Attributes:
        name: The group's name, for messages.
        rank: This rank in the group.
        size: W, the number of ranks.
        world_ranks: The members' ranks in the world, in group order.
        on_timeout: ``ABORT`` or ``RAISE``, the same on all ranks.
    """

    def __init__(
        self, comm: Communicator, name: str, world_ranks: Sequence[int], on_timeout: str
    ) -> None:
        self.name = name
        self.rank = comm.rank
        self.size = comm.size
        self.world_ranks = tuple(world_ranks)
        self.on_timeout = on_timeout
        self._comm = comm
        self._mpi = comm.plain
        self._failure: MpidistError | None = None
        self._closed = False
        # by operation; every call may need one, and writing it takes longer than MPI
        self._wheres: dict[str, str] = {}

    def where(self, operation: str) -> str:
        """Return the beginning of a message about ``operation``."""
        text = self._wheres.get(operation)
        if text is None:
            text = self._wheres[operation] = (
                f'rank {self.rank} of {self.size} (group "{self.name}"): {operation}'
            )
        return text

    def fail(self, error: MpidistError) -> None:
        """Make every later call, and the one under way when MPI lets it go, raise ``error``."""
        self._failure = self._failure or error
        self._close_fast_path()

    def revoke(self) -> bool:
        """Make MPI refuse the group's communicator on all ranks (ULFM); say whether MPI could."""
        try:
            for mpi in (self._mpi, *self._comm.children()):
                mpi.Revoke()
        except Exception:  # MPI without ULFM: NotImplementedError, or MPI's own error
            return False
        return True

    def _close_fast_path(self) -> None:
        """Send every later call through ``_launch`` and its checks."""

    def _require_usable(self, operation: str) -> None:
        if self._closed:
            raise GroupError(f"{self.where(operation)} was called on a closed group")
        if self._failure is not None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            # A copy: raised again and again, one exception would gather the frames of all its
            # callers.
            raise copy.copy(self._failure)

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        """Raise errors of the block as ``_explain`` returns them."""
        try:
            yield
        except Exception as error:
            explained = self._explain(error, operation)
            if explained is error:
                raise
            raise explained from error

    def _explain(self, error: Exception, operation: str) -> Exception:
        """Return what the user should see for what an operation raised, and note whether the group is lost."""
        if isinstance(error, LengthError):
            return DisagreementError(
                f"{self.where(operation)}: {error}; with MPIDIST_DEBUG=1 all ranks compare before "
                "they communicate"
            )
        if not mpi_errors.is_mpi_error(error):
            if (
                self.on_timeout == RAISE
                and self._failure is not None
                and isinstance(error, MpidistError)
            ):
                nonblocking.keep_buffers(error)
                runtime.note_failure()
            return error
        if self._failure is not None:  # the watchdog, or another thread, knows why
            return self._failure
        told = mpi_errors.translate(error, self.where(operation))
        if isinstance(told, RankFailureError):
            # Another rank may have revoked the group because of one that left in peace, of which
            # MPI has nothing to say.
            dead = exited_ranks.among(self.world_ranks) or mpi_errors.failed_ranks(
                self._mpi, self.world_ranks
            )
            if dead:
                if not exited_ranks.among(dead):
                    runtime.note_failure(dead)
                told = RankFailureError(
                    f"{told}; world ranks that failed: {', '.join(map(str, dead))}", dead
                )
            self.fail(told)
            self.revoke()  # the others may wait for a rank that has just given up
        return told
