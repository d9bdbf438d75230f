"""Background consolidation: a copy of each rank's state is sent on a separate group and thread."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist import saved_file, whole_file
from mpidist.comm.execution.progress import here
from mpidist.comm.execution.work import Work
from mpidist.comm.group_types import Group
from mpidist.comm.mpi import runtime
from mpidist.errors import MpidistError
from mpidist.zero.state import state_dict
from mpidist.zero.state.consolidation import gathered
from mpidist.zero.state.result_memory import KeptMemory
from mpidist.zero.state.shard_state import ShardState

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

_NICE = 19  # the lowest priority
# Groups that were not closed. They end with the job: closing is collective, so no finalizer can.
_open: list[Group] = []


def _drop() -> None:
    for group in _open:
        group.close()
    _open.clear()


runtime.belongs_to_world(_drop)


class Consolidating:
    """Handle of a consolidation in progress; see ``OSS.consolidate_async``."""

    def __init__(self, work: Work, found: list[StateDict]) -> None:
        self._work = work
        self._found = found

    def done(self) -> bool:
        """Return whether the consolidation has ended on this rank, with or without an error."""
        return self._work.is_completed()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the state is on the recipient, and its file, if any, is complete.

        Args:
            timeout: Seconds; None for no limit.

        Raises:
            CommTimeout: Not ended in time; the consolidation continues.
            MpidistError: The recipient could not write the file (other ranks; the recipient raises
                its own error).
        """
        self._work.wait(timeout)

    def result(self, timeout: float | None = None) -> StateDict | None:
        """Wait; return the state dict in torch's format, None on ranks other than recipients."""
        self.wait(timeout)
        return self._found[0] if self._found else None


class Background:
    """Group and memory of one optimizer's background consolidations.

    Args:
        group: Native group; a clone is made at the first ``start``.
    """

    def __init__(self, group: Group) -> None:
        self._parent = group
        self._group: Group | None = None
        self._work: Work | None = None
        self._snapshots = KeptMemory()
        self._results = KeptMemory()

    def start(
        self,
        state: ShardState,
        recipient: int,
        chunk_bytes: int,
        path: str | os.PathLike[str] | None,
    ) -> Consolidating:
        """Copy the state and start its transfer. Collective: over the group.

        Blocks: until the previous transfer has ended and this rank's state is copied.

        Args:
            state: This rank's.
            recipient: Rank in the group; -1 for all.
            path: File that the recipient writes; None: no file.
        """
        if self._group is None:
            self._group = self._parent.clone(f"{self._parent.name}/consolidation")
            self._group.end_with_world()
            _open.append(self._group)
        self._finish()
        group, results = self._group, self._results
        snapshot = [state.copied(self._snapshots)]
        packed_groups = list(state.groups)
        found: list[StateDict] = []

        def transfer() -> None:
            _lower_priority()
            # Popped, so that the next snapshot can reuse the memory after this transfer.
            whole = gathered(group, snapshot.pop(), recipient, chunk_bytes, results)
            if whole is not None:
                found.append(state_dict.assembled(whole, packed_groups))
            if path is not None:
                _write_on_recipient(group, found, recipient, Path(path))

        self._work = group.in_order(transfer, async_op=True, operation="consolidate_async")
        assert self._work is not None
        return Consolidating(self._work, found)

    def close(self) -> None:
        """Wait for the last consolidation, and close the group. Collective: over the group."""
        self._finish()
        if self._group is not None:
            if self._group in _open:
                _open.remove(self._group)
            self._group.close()
            self._group = None

    def _finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait_quietly()  # the handle raises its error


def write(state: StateDict, path: Path) -> None:
    """Write a file that is complete, and on the disk, when it has its name."""
    with whole_file.replacing(path) as file:
        saved_file.write(state, file)


def _lower_priority() -> None:
    """Lower the priority of the group's thread, so that it runs on idle cores.

    A thread of the user's that waits for the transfer executes it itself, and keeps its priority,
    which it could not raise again.
    """
    if here.is_of_group:
        with contextlib.suppress(OSError):
            # Linux's priorities are those of threads.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _write_on_recipient(group: Group, found: list[StateDict], recipient: int, path: Path) -> None:
    if group.rank != recipient:
        # A receive, not a collective: the wait sleeps while the recipient writes.
        failure, _ = group.recv_object(recipient)
        if failure is not None:
            raise MpidistError(f"rank {recipient} could not write {path}: {failure}")
        return
    error: Exception | None = None
    try:
        write(found[0], path)
    except Exception as raised:
        error = raised
    for rank in range(group.size):
        if rank != recipient:
            group.send_object(None if error is None else f"{type(error).__name__}: {error}", rank)
    if error is not None:
        raise error
