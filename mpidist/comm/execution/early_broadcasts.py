"""Broadcasts between nodes whose messages begin before their turn in the group's queue.

While the thread that executes a queued broadcast waits, it starts the messages of the broadcasts
directly behind it and passes on what comes. In its turn such a broadcast waits for the rest. So
several share the network, and order, journal, callbacks and errors stay those of a queue.

Where a callback is due, which may issue collectives that come first, nothing behind is started. A
callback that is added later precedes operations that were queued before it on some ranks and not on
others, with or without this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.comm.algorithms import movement, tree_broadcast
from mpidist.comm.algorithms.tree_broadcast import Transfer
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.execution.progress import Progress
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.tags import BROADCAST_TAGS


class EarlyBroadcasts:
    """The broadcasts of one group that are under way before their turn.

    Used by the thread that executes the queue.

    Args:
        comm: The group's communicator.
        progress: Its queue.

    Attributes:
        progress: The queue.
    """

    @classmethod
    def of(cls, comm: Communicator, progress: Progress) -> EarlyBroadcasts | None:
        """Return those of a group; None where broadcasts are calls of MPI."""
        return cls(comm, progress) if tree_broadcast.applies(comm) else None

    def __init__(self, comm: Communicator, progress: Progress) -> None:
        self.progress = progress
        self._comm = comm
        self._count = 0  # they are so many of the queue's first operations
        self._unsettled: list[Transfer] = []

    def queued(self, operation: Operation, execute: Callable[[], Any]) -> Callable[[], Any]:
        """Return what is queued to execute an operation by ``execute``."""
        if operation.execute is not movement.broadcast:
            return execute
        return QueuedBroadcast(self, operation, execute)

    def advance(self) -> bool:
        """Start what can be started, and pass on what has come.

        Returns:
            Whether any are under way.
        """
        self._start_next()
        if self._unsettled:
            self._unsettled = [t for t in self._unsettled if not t.pass_on()]
        return self._count > 0

    def leave(self, transfer: Transfer) -> None:
        """Forget the first of them, whose turn has come."""
        self._count -= 1
        self._unsettled = [t for t in self._unsettled if t is not transfer]

    def _start_next(self) -> None:
        progress = self.progress
        while self._count < BROADCAST_TAGS - 1:
            try:
                _, execute = progress.items[self._count]
            except IndexError:
                return
            before = progress.items[self._count - 1] if self._count else progress.popped
            if (
                not isinstance(execute, QueuedBroadcast)
                or before is None
                or before[0].has_callbacks()
            ):
                return
            self._count += 1
            self._unsettled.append(execute.start_early(self._comm))


class QueuedBroadcast:
    """A broadcast in the queue of a group; called in its turn.

    Args:
        early: Those of its group that are under way.
        operation: The broadcast.
        execute: Executes it.
    """

    __slots__ = ("_early", "_execute", "_operation", "_transfer")

    def __init__(
        self, early: EarlyBroadcasts, operation: Operation, execute: Callable[[], Any]
    ) -> None:
        self._early = early
        self._operation = operation
        self._execute = execute
        self._transfer: Transfer | None = None

    def start_early(self, comm: Communicator) -> Transfer:
        """Start the messages before the broadcast's turn."""
        operation = self._operation
        (root,) = operation.args
        self._transfer = Transfer(comm, operation.inputs or operation.outputs, root)
        return self._transfer

    def __call__(self) -> Any:
        """Execute the broadcast, whose turn has come."""
        early, operation = self._early, self._operation
        if self._transfer is not None:
            early.leave(self._transfer)
        before = operation.args
        operation.args = (*before, self._in_turn)
        try:
            return self._execute()
        finally:
            # No cycle of references holds the tensors.
            operation.args = before
            transfer, self._transfer = self._transfer, None
            if transfer is not None:
                transfer.meanwhile = None
                # The group has failed before its turn.
                transfer.abandon()

    def _in_turn(self, comm: Communicator, tensors: Tensors, root: int) -> Transfer:
        if self._transfer is None:
            self._transfer = Transfer(comm, tensors, root)
        popped = self._early.progress.popped
        # A callback's broadcast is not queued, and others of the callback may follow it.
        if popped is not None and popped[1] is self:
            self._transfer.meanwhile = self._early.advance
        return self._transfer
