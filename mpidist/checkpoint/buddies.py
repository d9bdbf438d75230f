"""Buddies (pure): ranks on other nodes that keep copies of files, and the copies that a load needs.

Letters: W ranks of the group. Nodes are given by the node number of each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """Message that brings one file to a node."""

    name: str
    source: int  # ranks
    dest: int


def buddy_of(rank: int, nodes: Sequence[int]) -> int | None:
    """Return the rank on the next node that keeps a rank's files; None on a single node."""
    numbers = sorted(set(nodes))
    if len(numbers) == 1:
        return None
    following = numbers[(numbers.index(nodes[rank]) + 1) % len(numbers)]
    here, there = members(nodes[rank], nodes), members(following, nodes)
    return there[here.index(rank) % len(there)]


def members(node: int, nodes: Sequence[int]) -> list[int]:
    """Return the ranks of a node."""
    return [rank for rank, other in enumerate(nodes) if other == node]


def copies(
    wanted: Sequence[Collection[str]], held: Sequence[Collection[str]], nodes: Sequence[int]
) -> list[Copy]:
    """Return the messages that bring each node the files that its ranks want and it lacks.

    Args:
        wanted: Names by rank.
        held: Names that the rank's node holds, by rank; equal for all ranks of a node.
        nodes: Node of each rank.

    Raises:
        LookupError: No node holds a file: its name.
    """
    found: list[Copy] = []
    for node in sorted(set(nodes)):
        here = members(node, nodes)
        lacking = sorted({name for rank in here for name in wanted[rank]} - set(held[here[0]]))
        for name in lacking:
            source = next((rank for rank in range(len(nodes)) if name in held[rank]), None)
            if source is None:
                raise LookupError(name)
            found.append(Copy(name, source, here[0]))
    return found
