"""Shared memory of a group's ranks on one node, and averages in it without messages.

Each rank reduces its shard of all ranks' tensors in place, and writes the result into each of them:
every element is read W times and written W times, with no other copy. MPI on the same memory takes
three to four times as long for large tensors.

The memory is an anonymous file that all ranks map. It is freed with the last tensor in it, however
the job ends, and may outlive the group.

Letters: W ranks of the group; N elements.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI

Tensor = torch.Tensor
Ranges = Sequence[tuple[int, int]]  # start and end, in elements

# The second pass over a block of this size finds it in the cache.
_BLOCK_BYTES = 1 << 20
_NARROW = (torch.float16, torch.bfloat16)


class SharedMemory:
    """Memory of each rank of a group, zeros at first, mapped by this rank."""

    def __init__(self, group: Any, maps: list[mmap.mmap]) -> None:
        self._group = group
        self._maps = maps

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> SharedTensor:
        """Return a range of each rank's memory as a tensor.

        Args:
            offset_bytes: A multiple of the element's size; all arguments are the same on all ranks.
            numel: N.
            dtype: The dtype.
        """
        with autograd_mode.allocating():
            tensors = [
                torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset_bytes)
                for memory in self._maps
            ]
        return SharedTensor(self._group, tensors)


class SharedTensor:
    """N elements of each rank of a group, in shared memory.

    Attributes:
        group: The group.
        own: This rank's N elements.
    """

    def __init__(self, group: Any, tensors: list[Tensor]) -> None:
        self.group = group
        self.own = tensors[group.rank]
        self._others = tensors[: group.rank] + tensors[group.rank + 1 :]
        # The order of the additions; without this the own contribution is the first.
        self._in_rank_order = tensors if group._comm.adds_in_rank_order else None
        self._scratch: Tensor | None = None

    def average(self) -> None:
        """Average ``own`` over all ranks, in place; all ranks hold the same bits.

        Half types are accumulated in fp32.

        Collective: over the group, in the order of its operations.

        Blocks: until this rank's result is complete.
        """
        self.group._require_no_nan("average", (self.own,))
        self.group.in_order(self._average, async_op=False, operation="average", results=(self.own,))

    def _average(self) -> None:
        group, numel = self.group, self.own.numel()
        # All contributions are complete after this barrier.
        group.barrier()
        first, end = numel * group.rank // group.size, numel * (group.rank + 1) // group.size
        step = _BLOCK_BYTES // self.own.element_size()
        for start in range(first, end, step):
            self._average_block(start, min(start + step, end), self._others)
        # All shards are complete after this one.
        group.barrier()

    def _average_block(self, start: int, end: int, targets: Sequence[Tensor]) -> None:
        mine = self.own[start:end]
        first, *others = self._in_rank_order or (self.own, *self._others)
        total = mine
        if first is not self.own or mine.dtype in _NARROW:
            total = self._wide_block(end - start).copy_(first[start:end])
        for other in others:
            total.add_(other[start:end])
        total.div_(self.group.size)
        if total is not mine:
            mine.copy_(total)
        for target in targets:
            target[start:end].copy_(mine)

    def _wide_block(self, numel: int) -> Tensor:
        """Return memory for sums, in the dtype of the sums."""
        if self._scratch is None:
            dtype = self.own.dtype
            with autograd_mode.allocating():
                self._scratch = torch.empty(
                    _BLOCK_BYTES // dtype.itemsize,
                    dtype=torch.float32 if dtype in _NARROW else dtype,
                    device="cpu",
                )
        return self._scratch[:numel]

    def reduce_to_owners(self, by_rank: Sequence[Ranges], common: Ranges = ()) -> None:
        """Average ranges over all ranks, each into its owner's memory, with ``average``'s bits.

        Ranks share the additions as in ``average``, so the time does not depend on how much a rank
        owns. Elements of ``own`` that the rank does not own have undefined values afterwards.

        Collective: over the group, in the order of its operations, with the same ranges.

        Blocks: until this rank's result is complete and no rank reads its memory.

        Args:
            by_rank: The ranges that each rank owns, as start and end in elements; no element has
                two owners.
            common: Ranges that all ranks own.
        """
        self.group._require_no_nan("reduce_to_owners", (self.own,))
        run = partial(self._reduce_to_owners, by_rank, common)
        self.group.in_order(run, async_op=False, operation="reduce_to_owners", results=(self.own,))

    def _reduce_to_owners(self, by_rank: Sequence[Ranges], common: Ranges) -> None:
        group, numel = self.group, self.own.numel()
        # All contributions are complete after this barrier.
        group.barrier()
        first, end = numel * group.rank // group.size, numel * (group.rank + 1) // group.size
        step = _BLOCK_BYTES // self.own.element_size()
        for owner, ranges in enumerate(by_rank):
            others = [] if owner == group.rank else [self._others[owner - (owner > group.rank)]]
            for start, stop in _within(ranges, first, end, step):
                self._average_block(start, stop, others)
        for start, stop in _within(common, first, end, step):
            self._average_block(start, stop, self._others)
        # All shards are complete after this one.
        group.barrier()


def _within(ranges: Ranges, first: int, end: int, step: int) -> list[tuple[int, int]]:
    """Return the parts of ranges in [first, end), in blocks of at most ``step`` elements."""
    return [
        (start, min(start + step, end, stop))
        for begin, stop in ranges
        for start in range(max(begin, first), min(stop, end), step)
    ]


def share(group: Any, nbytes: int) -> SharedMemory | None:
    """Return shared memory with ``nbytes`` for each rank of a group.

    Collective: over the group.

    Returns:
        None on all ranks if a rank cannot map another's memory: other nodes, separate containers,
        an old kernel.
    """
    if group.size == 1 or not group.is_single_node or not nbytes:
        return None
    found: list[list[mmap.mmap] | None] = []
    group.in_order(
        lambda: found.append(shared_maps(group._comm, [nbytes] * group.size)), async_op=False
    )
    return None if found[0] is None else SharedMemory(group, found[0])


def shared_maps(comm: Communicator, sizes: Sequence[int]) -> list[mmap.mmap] | None:
    """Map memory of each rank of a communicator on one node, zeros at first.

    Collective: over the communicator.

    Args:
        comm: The communicator.
        sizes: Bytes (> 0) of each rank.

    Returns:
        None on all ranks if a mapping fails on any.
    """
    file = anonymous_file(sizes[comm.rank])
    try:
        return maps_of(comm, file, sizes)
    finally:
        # All ranks have mapped the file, or none will use it.
        if file >= 0:
            os.close(file)


def anonymous_file(nbytes: int, is_sparse: bool = False) -> int:
    """Return the descriptor of a new file of zeros that has no name; -1 if there is no room.

    Args:
        nbytes: Its length.
        is_sparse: Allocate memory for the first page alone.
    """
    try:
        file = os.memfd_create("mpidist", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return -1
    try:
        os.ftruncate(file, max(nbytes, 8))
        # Allocated now: if memory is short, this is an error here and not a signal at first access.
        os.posix_fallocate(file, 0, 8 if is_sparse else max(nbytes, 8))
    except OSError:
        os.close(file)
        return -1
    return file


def maps_of(comm: Communicator, file: int, sizes: Sequence[int]) -> list[mmap.mmap] | None:
    """Map the file of each rank of a communicator on one node.

    Collective: over the communicator.

    Args:
        comm: The communicator.
        file: This rank's, from ``anonymous_file`` and not written yet; -1 for none.
        sizes: Bytes (> 0) of each rank's.

    Returns:
        None on all ranks if a mapping fails on any.
    """
    token = secrets.randbits(62)
    own = _map(file, sizes[comm.rank])
    if own is not None:
        own[:8] = token.to_bytes(8, "little")
    facts = np.empty((comm.size, 3), np.int64)
    comm.mpi.Allgather(np.array([os.getpid(), file, token]), facts)
    maps = _mapped(comm.rank, own, facts.tolist(), sizes)
    reaches_all = np.array([maps is not None], np.int64)
    comm.mpi.Allreduce(MPI.IN_PLACE, reaches_all, MPI.MIN)
    if maps is None or own is None or not reaches_all[0]:
        return None
    own[:8] = bytes(8)
    # No rank may write before all tokens are cleared.
    comm.mpi.Barrier()
    return maps


def _map(file: int, nbytes: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(file, max(nbytes, 8)) if file >= 0 else None
    except (OSError, ValueError):  # ValueError: a file of another size
        return None


def _mapped(
    rank: int, own: mmap.mmap | None, facts: list[list[int]], sizes: Sequence[int]
) -> list[mmap.mmap] | None:
    """Map all ranks' files; None if one is unreachable, or its token is another file's."""
    if own is None or any(file < 0 for _, file, _ in facts):
        return None
    maps = []
    for other, (process, file, token) in enumerate(facts):
        memory: mmap.mmap | None = own
        if other != rank:
            try:
                opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return None
            memory = _map(opened, sizes[other])
            os.close(opened)
        if memory is None or memory[:8] != token.to_bytes(8, "little"):
            return None
        maps.append(memory)
    return maps
