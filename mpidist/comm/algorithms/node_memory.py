"""Node memory of a group: tensors that the other ranks read where they lie, without messages.

Each rank has an arena: address space over an anonymous file, as long as the rank's part of the
node's memory, which all ranks map once. A tensor takes a range of its own rank's arena and gives it
back when nothing refers to it any more; physical memory is added where a range needs it, and kept
for later tensors. A rank writes in its own arena alone. The others read there within a collective,
between the arrival of all ranks and the barrier at its end: afterwards a rank may write or drop its
tensor, as it may after any collective.

The arenas are freed when the group is closed and the last tensor in them is gone, however the job
ends.

Letters: W ranks of the group; N bytes of one contribution.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import warnings
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from mpidist.comm.algorithms.shared_memory import anonymous_file, maps_of
from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.communicator import Communicator
from mpidist.kernels.view import byte_view

Tensor = torch.Tensor

# Contributions below this size are gathered by MPI, which is as fast; all ranks know the size.
SMALLEST_BYTES = 64 << 10
# Tensors start at pages, so that ranks do not write to one page.
_PAGE_BYTES = 4096
_KEPT = "node memory"


class Ranges:
    """Free ranges of an arena: first fit, neighbours joined.

    Args:
        nbytes: Length of the arena.
    """

    def __init__(self, nbytes: int) -> None:
        self._free = [(0, nbytes)]  # start and end, ascending

    def take(self, nbytes: int) -> int | None:
        """Return the start of the lowest free range of ``nbytes``; None if there is none."""
        for place, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[place : place + 1] = (
                    [(start + nbytes, end)] if end - start > nbytes else []
                )
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Make a range free that was taken."""
        end = start + nbytes
        place = next((i for i, (other, _) in enumerate(self._free) if other > start), None)
        place = len(self._free) if place is None else place
        first = last = place
        if place and self._free[place - 1][1] == start:
            first, start = place - 1, self._free[place - 1][0]
        if place < len(self._free) and self._free[place][0] == end:
            last, end = place + 1, self._free[place][1]
        self._free[first:last] = [(start, end)]


class _Lease(np.ndarray):
    """The part of an arena that one tensor's memory takes; gives it back when it is dropped."""

    given_back: deque[tuple[int, int]]
    range: tuple[int, int]

    def __del__(self) -> None:
        # Without a lock: the garbage collector may run this in any thread, at any point.
        self.given_back.append(self.range)


class NodeMemory:
    """The arenas of a group's ranks, mapped by this rank.

    Args:
        where: Rank and group, for the warning.
        rank: This rank.
        file: Of the own arena, which this object closes.
        arenas: Of all ranks; None where the ranks cannot map each other's memory.

    Attributes:
        is_shared: The ranks map each other's arenas.
    """

    def __init__(
        self, where: str, rank: int, file: int, arenas: Sequence[mmap.mmap] | None
    ) -> None:
        self._where = where
        self._file = file
        self._given_back: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._committed_bytes = 0
        self._is_short = False
        self.is_shared = arenas is not None
        if arenas is None:
            return
        self._own = arenas[rank]
        self._nbytes = len(self._own)
        self._ranges = Ranges(self._nbytes)
        with autograd_mode.allocating():
            self._arenas = [torch.frombuffer(arena, dtype=torch.uint8) for arena in arenas]
        self._start = self._arenas[rank].data_ptr()
        self._row = np.empty(2, np.int64)
        self._rows = np.empty((len(arenas), 2), np.int64)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor with undefined values; in plain memory, with one warning, if it is short.

        Blocks: no.
        """
        numel = math.prod(shape)
        nbytes = -(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES
        start = self._take(nbytes) if numel else None
        with autograd_mode.allocating():
            if start is None:
                return torch.empty(shape, dtype=dtype, device="cpu")
            lease = np.frombuffer(self._own, np.uint8, nbytes, start).view(_Lease)
            lease.given_back, lease.range = self._given_back, (start, nbytes)
            # From a memoryview: numpy would have the tensor refer to the arena, not to the lease.
            memory = memoryview(lease)  # type: ignore[arg-type]
            return torch.frombuffer(memory, dtype=dtype, count=numel).view(tuple(shape))

    def offset(self, tensor: Tensor) -> int:
        """Return the first byte of a tensor in this rank's arena; -1 if it is not there."""
        if not (self.is_shared and tensor.is_cpu):
            return -1
        start = tensor.data_ptr() - self._start
        return start if start >= 0 and start + tensor.nbytes <= self._nbytes else -1

    def all_gather(self, comm: Communicator, source: Tensor, target: Tensor) -> bool:
        """Gather each rank's tensor of N bytes into a flat one, by copies within the node.

        Collective: over the group, within an operation.

        Blocks: until this rank's target is complete and no rank reads its contribution.

        Args:
            comm: The group's communicator.
            source: This rank's contribution; may lie in place in the target.
            target: W·N bytes.

        Returns:
            False on all ranks if a rank has neither tensor in this memory, or another N; then no
            contribution has moved.
        """
        nbytes, rank = source.nbytes, comm.rank
        parts = byte_view(target).view(comm.size, nbytes)
        is_in_place = source.data_ptr() == parts[rank].data_ptr()
        offset = self.offset(target)
        if offset >= 0:
            offset += rank * nbytes
            if not is_in_place:
                parts[rank].copy_(byte_view(source))
        else:
            offset = self.offset(source)
        self._row[:] = offset, nbytes
        # All contributions are complete when every rank has sent its row.
        comm.mpi.Allgather(self._row, self._rows)
        rows = self._rows.tolist()
        if any(start < 0 or length != nbytes for start, length in rows):
            return False
        if not is_in_place and self.offset(target) < 0:
            parts[rank].copy_(byte_view(source))
        # Each rank begins with its neighbour's, so that not all read one rank's memory at once.
        for peer in (*range(rank + 1, comm.size), *range(rank)):
            start = rows[peer][0]
            parts[peer].copy_(self._arenas[peer][start : start + nbytes])
        comm.mpi.Barrier()
        return True

    def _take(self, nbytes: int) -> int | None:
        if not self.is_shared:
            self._warn("the ranks cannot map each other's memory")
            return None
        with self._lock:
            while self._given_back:
                self._ranges.give(*self._given_back.popleft())
            start = self._ranges.take(nbytes)
            if start is None:
                self._warn(f"{nbytes} bytes are more than is left of this rank's {self._nbytes}")
                return None
            missing = start + nbytes - self._committed_bytes
            if missing > 0:
                try:
                    # If memory is short, this is an error here and not a signal at first access.
                    os.posix_fallocate(self._file, self._committed_bytes, missing)
                except OSError as error:
                    self._ranges.give(start, nbytes)
                    self._warn(f"{nbytes} bytes: {error.strerror}")
                    return None
                self._committed_bytes += missing
            return start

    def _warn(self, reason: str) -> None:
        if not self._is_short:
            self._is_short = True
            warnings.warn(
                f"{self._where} has no memory that the ranks of the node share ({reason}); plain "
                "memory takes its place, with the same results by MPI's messages",
                RuntimeWarning,
                stacklevel=4,
            )


def of(comm: Communicator) -> NodeMemory | None:
    """Return the memory that ``make`` has made for a communicator's group, or None."""
    held: NodeMemory | None = comm.kept.get(_KEPT)
    return held


def make(comm: Communicator, inputs: object, outputs: object, where: str) -> NodeMemory:
    """Make the arenas of a communicator on one node, once; the executor of an operation.

    Collective: over the communicator.
    """
    held = of(comm)
    if held is None:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        nbytes = memory_bytes // comm.size // _PAGE_BYTES * _PAGE_BYTES
        file = anonymous_file(nbytes, is_sparse=True)
        arenas = maps_of(comm, file, [nbytes] * comm.size)
        held = comm.kept[_KEPT] = NodeMemory(where, comm.rank, file, arenas)
    return held


def drop(comm: Communicator) -> None:
    """Give up the arenas, as far as no tensor lies in them."""
    comm.kept.pop(_KEPT, None)
