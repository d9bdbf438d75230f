"""Dependencies of one worker's part of a backward pass: the sources above each node. Pure.

The roots of the pass and every send that gets a gradient are **sources**. A node's **mask** is the
set of sources above it, as bits of an integer: the node can run once all of them have their
gradients. Nodes of one mask run together. Where an edge leads to a node of another mask the graph
is **cut**: the gradient at that edge is kept until the node below can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch.autograd.graph import Node

from mpidist.autograd.recording import LEAF, RECEIVE, Edge, Leaf

ROOTS = 0  # key of the roots among the sources; keys of messages are positive


class Captures:
    """Leaves and received tensors of one mask, where gradients leave the local graph."""

    __slots__ = ("leaves", "receives")

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.receives: list[Node] = []


class Plan:
    """The autograd graph below the sources.

    Args:
        sources: Edges of each source, none of them empty, by message number or ``ROOTS``.

    Attributes:
        keys: Message numbers or ``ROOTS``; bit i of a mask is the source ``keys[i]``.
        sources: Edges, in the order of ``keys``.
        masks: Mask of each node.
        order: All nodes, each after the nodes below it; empty with one source, which has no cuts.
        captures: Captures by mask.
        cuts: By mask, the edges from its nodes into nodes of another mask.
    """

    def __init__(self, sources: Mapping[int, Sequence[Edge]]) -> None:
        self.keys = list(sources)
        self.sources = list(sources.values())
        self.order: list[Node] = []
        self.masks: dict[Node, int] = {}
        self.captures: dict[int, Captures] = {}
        self.cuts: dict[int, set[Edge]] = {}
        if len(sources) == 1:
            ends = self._walk(self.sources[0])
        elif sources:
            ends = self._walk_in_order(self.sources)
            self._spread(self.sources)
        else:
            ends = []
        for node in ends:
            captures = self.captures.setdefault(self.masks[node], Captures())
            if type(node) is LEAF:
                captures.leaves.append(node)
            else:
                captures.receives.append(node)

    def _walk(self, edges: Sequence[Edge]) -> list[Node]:
        """Visit all nodes below one source, without an order: half the time of an ordered walk."""
        seen: set[Node] = set()
        ends: list[Node] = []
        stack = [node for node, _ in edges]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                kind = type(node)
                # The pass has no nodes below a leaf or a receive.
                if kind is LEAF or kind is RECEIVE:
                    ends.append(node)
                else:
                    stack += [below for below, _ in node.next_functions if below is not None]
        self.masks = dict.fromkeys(seen, 1)
        return ends

    def _walk_in_order(self, sources: Sequence[Sequence[Edge]]) -> list[Node]:
        order = self.order
        seen: set[Node] = set()
        ends: list[Node] = []
        for root in [node for edges in sources for node, _ in edges]:
            if root in seen:
                continue
            seen.add(root)
            kind = type(root)
            if kind is LEAF or kind is RECEIVE:
                ends.append(root)
                order.append(root)
                continue
            stack = [(root, iter(root.next_functions))]
            while stack:
                node, rest = stack[-1]
                for below, _ in rest:
                    if below is not None and below not in seen:
                        seen.add(below)
                        kind = type(below)
                        if kind is LEAF or kind is RECEIVE:
                            ends.append(below)
                            order.append(below)
                        else:
                            stack.append((below, iter(below.next_functions)))
                            break
                else:
                    stack.pop()
                    order.append(node)
        return ends

    def _spread(self, sources: Sequence[Sequence[Edge]]) -> None:
        """Compute the mask of every node, then the cuts."""
        masks = self.masks = dict.fromkeys(self.order, 0)
        for bit, edges in enumerate(sources):
            for node, _ in edges:
                masks[node] |= 1 << bit
        edges_of = {}
        for node in reversed(self.order):
            kind = type(node)
            if kind is LEAF or kind is RECEIVE:
                continue
            mask = masks[node]
            following = edges_of[node] = node.next_functions
            for below, _ in following:
                if below is not None:
                    masks[below] |= mask
        for node, following in edges_of.items():
            mask = masks[node]
            for below, input_nr in following:
                if below is not None and masks[below] != mask:
                    self.cuts.setdefault(mask, set()).add((below, input_nr))

    def above(self, cuts: Set[Edge], masks: Set[int]) -> list[Node]:
        """Return the nodes above some cuts, each after the nodes above it.

        Args:
            cuts: Edges.
            masks: Masks of the candidate nodes; no other nodes lie between them and the cuts.
        """
        found: dict[Node, None] = {}
        for node in self.order:
            kind = type(node)
            if kind is not LEAF and kind is not RECEIVE and self.masks[node] in masks:
                for edge in node.next_functions:
                    if edge in cuts or edge[0] in found:
                        found[node] = None
                        break
        return list(reversed(found))
