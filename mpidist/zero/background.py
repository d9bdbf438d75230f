"""Consolidation beside the training: a copy of this rank's state travels on a group and a thread of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpidist.comm.work import Work
from mpidist.errors import MpidistError
from mpidist.zero.consolidation import StateByNumber, gathered
from mpidist.zero.result_memory import KeptMemory
from mpidist.zero.shard_image import ShardImage

_NICE = 19  # the lowest priority
# groups that were not closed: they end with the job, and a finalizer could not close them
_open: list[Any] = []


class Consolidating:
    """A consolidation under way; see ``OSS.consolidate_async``."""

    def __init__(self, work: Work, found: list[dict[str, Any]]) -> None:
        self._work = work
        self._found = found

    def done(self) -> bool:
        """Say whether it has ended on this rank, well or not."""
        return self._work.is_completed()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end: the state is on the recipient, and the file, if one was asked for, is complete.

        Args:
            timeout: Seconds; None for no limit.

        Raises:
            CommTimeout: Not ended in time; it goes on.
            MpidistError: The recipient could not write the file (other ranks; the recipient raises
                what it raised).
        """
        self._work.wait(timeout)

    def result(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait, and return the state dict in torch's format; None on ranks that do not receive it."""
        self.wait(timeout)
        return self._found[0] if self._found else None


class Background:
    """The group and memory of one optimizer's consolidations beside the training.

    Args:
        group: Native group; a clone is made at the first ``start``.
    """

    def __init__(self, group: Any) -> None:
        self._of = group
        self._group: Any = None
        self._work: Work | None = None
        self._snapshots = KeptMemory()
        self._results = KeptMemory()

    def start(
        self,
        image: ShardImage,
        recipient: int,
        chunk_bytes: int,
        path: str | os.PathLike[str] | None,
        packed: Callable[[StateByNumber], dict[str, Any]],
    ) -> Consolidating:
        """Copy the image, and have its transfer begin. Collective: over the group.

        Blocks: until the last one has ended, and this rank's state is copied.

        Args:
            image: The state as it is.
            recipient: Rank in the group; -1 for all.
            path: Where the recipient writes the state dict; None: nowhere.
            packed: Makes the state dict of the state; called on the group's thread.
        """
        if self._group is None:
            self._group = self._of.clone(f"{self._of.name}/consolidation")
            _open.append(self._group)
        self._finish()
        group, results = self._group, self._results
        snapshot = [image.copied(self._snapshots)]
        found: list[dict[str, Any]] = []

        def transfer() -> None:
            _give_way()
            # Popped: once this has ended, nobody holds the memory of the snapshot, and the next one
            # takes it.
            state = gathered(group, snapshot.pop(), recipient, chunk_bytes, results)
            if state is not None:
                found.append(packed(state))
            if path is not None:
                _write_together(group, found, recipient, Path(path))

        self._work = group.in_order(transfer, async_op=True, operation="consolidate_async")
        assert self._work is not None
        return Consolidating(self._work, found)

    def close(self) -> None:
        """Wait for the last consolidation, and end the group. Collective: over the group."""
        self._finish()
        if self._group is not None:
            _open.remove(self._group)
            self._group.close()
            self._group = None

    def _finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.future.wait_quietly()  # its error is for those who hold its handle


def write(state_dict: dict[str, Any], path: Path) -> None:
    """Write a file that is there whole or not at all: beside its place, to the disk, then renamed."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)


def _give_way() -> None:
    """Lower this thread's priority: it takes cores that idle, and next to nothing of one that computes."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICE)
            )


def _write_together(group: Any, found: list[dict[str, Any]], recipient: int, path: Path) -> None:
    if group.rank != recipient:
        # A receive and no collective: its wait sleeps while the recipient writes.
        told, _ = group.recv_object(recipient)
        if told is not None:
            raise MpidistError(f"rank {recipient} could not write {path}: {told}")
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
