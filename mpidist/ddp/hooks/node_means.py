"""Averages by levels: exact within each node, and by the nodes' leaders between nodes.

A hook that rounds, on several ranks a node, rounds the mean of a node and not each rank's own
gradient: the ranks of a node average in their memory, and what the hook sends is sent once for each
node. A node's mean has the weight of its ranks, so nodes may have different numbers of them.

Letters: W ranks of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch

from mpidist.comm.algorithms.reduce_op import AVG, ReduceOp
from mpidist.comm.group_types import Group
from mpidist.comm.mpi import runtime

Tensor = torch.Tensor


class Averaging(Protocol):
    """Ranks that average a tensor: a group, or the nodes of one."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> object:
        """Reduce a tensor in place, on all ranks alike."""


def shares_nodes(group: Group) -> bool:
    """Return whether a group has several nodes, and several ranks on one of them."""
    return 1 < len(set(runtime.world().nodes_of(group.world_ranks))) < group.size


class NodeMeans:
    """Nodes of a group as the ranks of an average: the ranks of a node hold equal tensors.

    Collective: all of it, over the group, within one of its operations (``in_order``) or where none
    is under way.

    Args:
        group: A group that ``shares_nodes``.

    Attributes:
        ranks_per_node: The most ranks on one node.
    """

    def __init__(self, group: Group) -> None:
        self._node = group.split_by_node()
        self._leaders = group.split(0 if self._node.rank == 0 else None)
        nodes = Counter(runtime.world().nodes_of(group.world_ranks))
        self.ranks_per_node = max(nodes.values())
        # The leaders' average counts each node alike.
        self._weight = self._node.size * len(nodes) / group.size

    def average_within(self, tensor: Tensor) -> None:
        """Average a tensor over the ranks of this node, in place."""
        if self._node.size > 1:
            self._node.all_reduce(tensor, AVG)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = AVG) -> None:
        """Average a tensor, which is the same on all ranks of a node, over all W ranks."""
        assert op == AVG
        self.by_leaders(tensor, lambda leaders: leaders.all_reduce(tensor, AVG))

    def by_leaders(self, tensor: Tensor, average: Callable[[Group], object]) -> None:
        """Have the leaders average a tensor by ``average(their group)``; copy it on each node."""
        if self._leaders is not None:
            if self._weight != 1:
                tensor.mul_(self._weight)
            average(self._leaders)
        if self._node.size > 1:
            self._node.broadcast(tensor, 0)

    def close(self) -> None:
        """Close the groups."""
        for group in (self._leaders, self._node):
            if group is not None:
                group.close()
