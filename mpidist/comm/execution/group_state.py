"""State of a process group: its members, its journal, and whether it is open, closed or failed."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import NoReturn

from mpidist.comm.execution.group_settings import RAISE, GroupSettings
from mpidist.comm.execution.op_status import Journal
from mpidist.comm.mpi import (
    backoff,
    exited_ranks,
    mpi_errors,
    nonblocking,
    revocation,
    runtime,
)
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.matched_probe import LengthError
from mpidist.comm.recorder import recorder
from mpidist.errors import DisagreementError, GroupError, MpidistError, RankFailureError
from mpidist.weak_registry import WeakRegistry

_NEWS_S = 2.0  # longest wait for the report of a rank that has left the call by a timeout
_SLEEP_S = 0.01  # between the tests in that wait

_states: WeakRegistry[GroupState] = WeakRegistry()


def open_groups() -> list[GroupState]:
    """Return the states of this process's groups that are not closed."""
    return [state for state in _states.alive() if not state.is_closed]


def _forbid_in_child() -> None:
    # A forked child shares the parent's connections; its MPI calls would answer for the parent.
    for state in _states.alive():
        state.fail(
            MpidistError(
                f"{state.where('a collective')} was called in a process forked from the rank, "
                "which cannot communicate; "
                "use multiprocessing_context='spawn' or 'forkserver', and keep collectives in the "
                "parent"
            )
        )


os.register_at_fork(after_in_child=_forbid_in_child)


def _do_nothing() -> None:
    """Do nothing."""


class GroupState:
    """State of one group, which its executor, its messages and the watchdog share.

    Args:
        queue: The queued operations.

    Attributes:
        name: The group's name, for messages.
        key: Identifies the group; the same text on all its ranks.
        rank: This rank in the group.
        size: W, the number of ranks.
        world_ranks: The members' ranks in the world, in group order.
        timeout_s: Longest time of an operation until the watchdog reports it; None for no limit.
        on_timeout: ``ABORT`` or ``RAISE``, the same on all ranks.
        comm: The communicator.
        mpi: Its form that messages call.
        recorder: The process's recorder.
        label: Of the group in the recorder.
        journal: The operation that the group executes, and the waits for messages.
        failure: Raised by every later call; None as long as the group has not failed.
        is_closed: The group was closed.
        ends_with_world: Its owner closes it when the process leaves its world.
        close_fast_path: Called when the group fails or is closed, for calls that check neither.
    """

    def __init__(self, comm: Communicator, settings: GroupSettings, queue: Sized = ()) -> None:
        self.name = settings.name
        self.key = settings.key
        self.rank = comm.rank
        self.size = comm.size
        self.world_ranks = settings.world_ranks
        self.timeout_s = settings.timeout_s
        self.on_timeout = settings.on_timeout
        self.comm = comm
        self.mpi = comm.plain
        self.recorder = recorder.of_process()
        self.label = self.recorder.group(self.name, self.key, self.world_ranks)
        self.journal = Journal(self.name, self.key, queue, self.recorder, self.label)
        self.failure: MpidistError | None = None
        self.is_closed = False
        self.ends_with_world = False
        self.close_fast_path: Callable[[], None] = _do_nothing
        # Held while the communicator is revoked, which the watchdog's thread does: ``close`` gives
        # it up before or after that.
        self._revoking = threading.Lock()
        # Cached by operation, because formatting takes longer than a call of MPI.
        self._wheres: dict[str, str] = {}
        _states.add(self)

    def where(self, operation: str) -> str:
        """Return the beginning of a message about ``operation``."""
        text = self._wheres.get(operation)
        if text is None:
            text = self._wheres[operation] = (
                f'rank {self.rank} of {self.size} (group "{self.name}"): {operation}'
            )
        return text

    def peers_of(self, rank: int | None) -> tuple[int, ...]:
        """Return the world ranks that a message to or from ``rank`` needs; all others if None."""
        if rank is None:
            return self.world_ranks[: self.rank] + self.world_ranks[self.rank + 1 :]
        return (self.world_ranks[rank],)

    def close(self) -> None:
        """Refuse every later call."""
        with self._revoking:
            self.is_closed = True
        self.close_fast_path()

    def fail(self, error: MpidistError) -> None:
        """Raise ``error`` from every later call, and from the call under way when MPI returns."""
        self.failure = self.failure or error
        self.close_fast_path()

    def revoke(self) -> bool:
        """Revoke the group's communicator on all ranks (ULFM).

        Returns:
            False without ULFM, or if the group is closed: its communicator may be freed.
        """
        with self._revoking:
            if self.is_closed:
                return False
            return all([revocation.revoke(mpi) for mpi in (self.mpi, *self.comm.children())])

    def require_usable(self, operation: str) -> None:
        """Require a group that is neither closed nor failed.

        Raises:
            GroupError: It is closed.
            MpidistError: It has failed: its failure.
        """
        if self.is_closed:
            raise GroupError(f"{self.where(operation)} was called on a closed group")
        if self.failure is not None:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the group's failure, if it has failed."""
        if self.failure is not None:
            # A copy, because one exception raised repeatedly collects the frames of all callers.
            raise copy.copy(self.failure)

    @contextmanager
    def explained(self, operation: str, is_collective: bool = True) -> Iterator[None]:
        """Raise errors of the block as ``explain`` returns them."""
        try:
            yield
        except Exception as error:
            self.raise_explained(error, operation, is_collective)

    def raise_explained(
        self, error: Exception, operation: str, is_collective: bool = True
    ) -> NoReturn:
        """Raise an error that is being handled as ``explain`` returns it."""
        explained = self.explain(error, operation, is_collective)
        try:
            if explained is error:
                raise
            raise explained from error
        finally:
            # Its traceback holds this frame, and the group through those of the callers.
            del error, explained

    def leave(self, error: BaseException, operation: str, *held: object) -> None:
        """Handle an exception that leaves a collective before its end, as far as is known.

        MPI may go on to work on the collective's requests, and other ranks wait for this one's
        part: what MPI may use is kept as long as the process lives, and the group fails. An error
        of MPI itself is ``explain``'s. Nothing is left by an answer of the algorithm, which comes
        behind its last message, nor by a refusal of arguments, which comes before its first.

        Args:
            error: Being handled.
            operation: The collective's name.
            held: Its tensors, and owners of other memory of it.
        """
        answers = (LengthError, DisagreementError, TypeError, ValueError)
        if self.failure is None and isinstance(error, answers):
            return
        nonblocking.keep_memory_of(error, self.comm, held)
        if mpi_errors.is_mpi_error(error):
            return
        runtime.note_failure()
        if self.failure is None:
            self.fail(
                GroupError(
                    f"{self.where(operation)} was left by {type(error).__name__} before its end; "
                    "other ranks may wait in it, so this group can do no more on this rank. Make "
                    "another one"
                )
            )
            self.revoke()

    def message_error(self, error: Exception, operation: str) -> Exception:
        """Return the user's error for an error of a message, which fails no group."""
        return self.explain(error, operation, is_collective=False)

    def explain(self, error: Exception, operation: str, is_collective: bool = True) -> Exception:
        """Return the user's error for an error of an operation.

        If a rank died, a collective fails the group on all ranks; a message concerns two of them,
        and the others go on.

        Blocks: for up to 2 s at an error of MPI in a group with ``on_timeout="raise"``, until this
        rank knows whether another one has reported a timeout.
        """
        if isinstance(error, LengthError):
            return DisagreementError(
                f"{self.where(operation)}: {error}; with MPIDIST_DEBUG=1 all ranks compare before "
                "they communicate"
            )
        if self.on_timeout == RAISE:
            # A late rank's call meets the messages of a call that another rank has left, and MPI
            # may call them too long before this rank's watchdog has received the report.
            is_stray = (
                is_collective
                and mpi_errors.is_mpi_error(error)
                and not mpi_errors.is_failure(error)
            )
            if is_stray:
                backoff.until(
                    lambda: self.failure is not None, timeout_s=_NEWS_S, longest_s=_SLEEP_S
                )
                if self.failure is not None:
                    runtime.note_failure()
        if not mpi_errors.is_mpi_error(error):
            return error
        if self.failure is not None:
            # Recorded by the watchdog or another thread, and more precise than MPI's error.
            return self.failure
        explained = mpi_errors.explain(error, self.where(operation), self.mpi, self.world_ranks)
        if isinstance(explained, RankFailureError) and is_collective:
            dead = explained.ranks
            if dead and (exited_ranks.have_died(dead) or not exited_ranks.among(dead)):
                runtime.note_failure(dead)
            self.fail(explained)
            # Other ranks may wait for this one, which has left the operation.
            self.revoke()
        return explained
