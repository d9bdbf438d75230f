"""Memory for an all-gather in place: each rank writes its parts, then all ranks get all parts.

The ranks of a node map the same memory, so a part is copied once, directly into place, or not at
all if the node has one copy. Between nodes the first rank of each node exchanges the parts of its
node with the other first ranks, and the rest of the node copies from it: each byte crosses the
network once for each node, not once for each rank. Memory that ranks cannot share, and device
memory, is exchanged by the group's all-gather.

Letters: W ranks of the group.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

import torch

from mpidist.comm.algorithms import sendrecv
from mpidist.comm.algorithms.shared_memory import shared_maps
from mpidist.comm.execution.operation import Operation, Tensors
from mpidist.comm.group_types import Group
from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.communicator import Communicator

Tensor = torch.Tensor
_NAME = "gather_shards"
# For each rank its parts as (first, end) in bytes; the same number of parts for each rank.
Ranges = Sequence[Sequence[tuple[int, int]]]


class ShardMemory:
    """Bytes in which each rank writes its parts.

    Attributes:
        own: This rank's copy, or the copy of its node; uint8.
        is_one_copy: All ranks of a node have the same memory.
        leads: This rank is the first of its node.
    """

    def __init__(
        self, group: Group, own: Tensor, copies: Sequence[Tensor] | None, is_one_copy: bool
    ) -> None:
        self.own = own
        self.is_one_copy = is_one_copy
        nodes = group._comm.nodes
        self._ranks = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
        self.leads = self._ranks[0] == group.rank
        self._group = group
        self._copies = copies  # of the ranks of this node, ``_ranks``; None if not shared

    def prepare(self, ranges: Ranges) -> Callable[[], None]:
        """Return a function that copies the parts of all ranks into every copy.

        The function is collective over the group, in the order of its operations, behind one that
        no rank leaves before all have written their parts (a barrier, an all-reduce). It blocks
        until this rank's copy is complete and no rank reads its parts any more; the rank may then
        write them again.

        Args:
            ranges: For each rank the (first, end) of the bytes that it writes; the same on all
                ranks.
        """
        group = self._group
        if self._copies is None:
            return self._by_all_gather(ranges)
        execute = self._in_node_memory(group._comm, self._copies, ranges)
        at_once = group.prepared(_NAME, partial(execute, group._comm))

        def gather() -> None:
            if not at_once():
                group._launch(Operation(_NAME, execute))

        return gather

    def _by_all_gather(self, ranges: Ranges) -> Callable[[], None]:
        group, own = self._group, self.own
        places = range(max(map(len, ranges), default=0))
        parts = [
            [own[slice(*ranges[rank][place])] for rank in range(group.size)] for place in places
        ]

        def stages() -> None:
            for each in parts:
                group.all_gather(each, each[group.rank])

        return partial(group.in_order, stages, async_op=False, device=own.device, operation=_NAME)

    def _in_node_memory(
        self, comm: Communicator, copies: Sequence[Tensor], ranges: Ranges
    ) -> Callable[..., None]:
        """Return the execution of a gather, with its views of the memory made once."""
        own, is_one_copy, is_single_node = self.own, self.is_one_copy, comm.is_single_node
        reads_all = is_single_node or self.leads
        sources: dict[int, Tensor] = {}  # by rank, whose parts this one copies
        if not is_one_copy and reads_all:
            sources = dict(zip(self._ranks, copies, strict=True))
        elif not is_one_copy:
            sources = dict.fromkeys(range(comm.size), copies[0])
        pairs = [
            (own[first:end], source[first:end])
            for rank, source in sources.items()
            for first, end in ranges[rank]
            if rank != comm.rank and first < end
        ]

        def execute(comm: Communicator, inputs: Tensors = (), outputs: Tensors = ()) -> None:
            levels = None if is_single_node else comm.levels()
            node = comm if levels is None else levels.node
            if reads_all:
                for part, source in pairs:
                    part.copy_(source)
            if levels is not None:
                if levels.leaders is not None:
                    _between_nodes(comm, levels.leaders, own, ranges)
                # After the barrier the first rank has all parts.
                node.mpi.Barrier()
                if not reads_all:
                    for part, source in pairs:
                        part.copy_(source)
            if not is_one_copy:
                # After the barrier no rank reads this rank's parts.
                node.mpi.Barrier()

        return execute


def allocate(group: Group, nbytes: int, one_copy: bool = False) -> ShardMemory:
    """Allocate host memory of ``nbytes`` (> 0), shared by the ranks of each node if possible.

    Collective: over the group.

    Args:
        one_copy: One copy for each node; each rank has its own where memory cannot be shared.
    """
    return group.in_order(lambda: _allocated(group, group._comm, nbytes, one_copy), async_op=False)


def on_device(group: Group, nbytes: int, device: torch.device) -> ShardMemory:
    """Allocate device memory of ``nbytes``. Not collective."""
    with autograd_mode.allocating():
        return ShardMemory(
            group, torch.zeros(nbytes, dtype=torch.uint8, device=device), None, False
        )


def _allocated(group: Group, comm: Communicator, nbytes: int, one_copy: bool) -> ShardMemory:
    maps: list[mmap.mmap] | None = None
    if comm.size > 1 and (comm.is_single_node or comm.shares_nodes):
        node = comm if comm.is_single_node else comm.levels().node
        # All ranks of the group choose alike, because the first ranks of all nodes exchange parts.
        maps = shared_maps(
            node, [nbytes if rank == 0 or not one_copy else 1 for rank in range(node.size)]
        )
        reach = torch.tensor([maps is not None], device="cpu")
        group.all_reduce(reach, "min")
        if not reach:
            maps = None
    with autograd_mode.allocating():
        if maps is None:
            return ShardMemory(
                group, torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), None, False
            )
        held = maps[:1] if one_copy else maps
        copies = [torch.frombuffer(memory, dtype=torch.uint8, count=nbytes) for memory in held]
    own = copies[0] if one_copy else copies[node.rank]
    return ShardMemory(group, own, copies, one_copy)


def _between_nodes(comm: Communicator, leaders: Communicator, own: Tensor, ranges: Ranges) -> None:
    by_node: list[list[Tensor]] = [[] for _ in range(leaders.size)]
    for rank, parts in enumerate(ranges):
        by_node[comm.nodes[rank]] += [own[first:end] for first, end in parts if first < end]
    mine = by_node[leaders.rank]
    others = [node for node in range(leaders.size) if node != leaders.rank]
    sends = [(node, part) for node in others for part in mine]
    receives = [(node, part) for node in others for part in by_node[node]]
    sendrecv.sendrecv(leaders, sends, receives)
