"""Failure of a group: its cause, and the errors that its callers get."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mpidist.comm.execution.group_settings import RAISE, GroupSettings
from mpidist.comm.mpi import exited_ranks, mpi_errors, nonblocking, runtime
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.errors import DisagreementError, GroupError, MpidistError, RankFailureError


class Failing:
    """Base of a process group: its state, closed or failed, and its errors.

    Attributes:
        name: The group's name, for messages.
        rank: This rank in the group.
        size: W, the number of ranks.
        world_ranks: The members' ranks in the world, in group order.
        on_timeout: ``ABORT`` or ``RAISE``, the same on all ranks.
    """

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        self.name = settings.name
        self.rank = comm.rank
        self.size = comm.size
        self.world_ranks = settings.world_ranks
        self.on_timeout = settings.on_timeout
        self._comm = comm
        self._mpi = comm.plain
        self._failure: MpidistError | None = None
        self._closed = False
        # Held while the communicator is revoked, which the watchdog's thread does: ``close`` gives
        # it up before or after that.
        self._revoking = threading.Lock()
        # Cached by operation, because formatting takes longer than a call of MPI.
        self._wheres: dict[str, str] = {}

    def where(self, operation: str) -> str:
        """Return the beginning of a message about ``operation``."""
        text = self._wheres.get(operation)
        if text is None:
            text = self._wheres[operation] = (
                f'rank {self.rank} of {self.size} (group "{self.name}"): {operation}'
            )
        return text

    def _message_error(self, error: Exception, operation: str) -> Exception:
        """Return the user's error for an error of a message, which fails no group."""
        return self._explain(error, operation, is_collective=False)

    def fail(self, error: MpidistError) -> None:
        """Raise ``error`` from every later call, and from the call under way when MPI returns."""
        self._failure = self._failure or error
        self._close_fast_path()

    def revoke(self) -> bool:
        """Revoke the group's communicator on all ranks (ULFM).

        Returns:
            False without ULFM, or if the group is closed: its communicator may be freed.
        """
        with self._revoking:
            if self._closed:
                return False
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
            # A copy, because one exception raised repeatedly collects the frames of all callers.
            raise copy.copy(self._failure)

    @contextmanager
    def _explained(self, operation: str, is_collective: bool = True) -> Iterator[None]:
        """Raise errors of the block as ``_explain`` returns them."""
        try:
            yield
        except Exception as error:
            explained = self._explain(error, operation, is_collective)
            if explained is error:
                raise
            raise explained from error

    def _explain(self, error: Exception, operation: str, is_collective: bool = True) -> Exception:
        """Return the user's error for an error of an operation.

        If a rank died, a collective fails the group on all ranks; a message concerns two of them,
        and the others go on.
        """
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
        if self._failure is not None:
            # Recorded by the watchdog or another thread, and more precise than MPI's error.
            return self._failure
        explained = mpi_errors.explain(error, self.where(operation), self._mpi, self.world_ranks)
        if isinstance(explained, RankFailureError) and is_collective:
            dead = explained.ranks
            if dead and (exited_ranks.have_died(dead) or not exited_ranks.among(dead)):
                runtime.note_failure(dead)
            self.fail(explained)
            # Other ranks may wait for this one, which has left the operation.
            self.revoke()
        return explained
