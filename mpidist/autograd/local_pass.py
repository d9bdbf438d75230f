"""One worker's part of a backward pass: runs torch's engine as gradients of the sources arrive.

Nodes are ready when the gradients of all their sources have arrived. One call of torch's engine
runs all ready nodes, and captures gradients at leaves, at received tensors and at cuts
(``dependencies``). The call is delayed until another worker waits for one of its results, or until
all gradients have arrived. Every node runs once, in torch's engine, with its hooks.

Cuts at inner nodes, and at leaves with hooks, need care. torch's engine runs the hooks of a node
where it captures a gradient, although this gradient is only a part of the node's. The engine also
continues through such a node if it captures another gradient below. Therefore the nodes above these
cuts run one at a time, each stopped by a hook after it; all other ready nodes follow in one call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, Node

from mpidist.autograd.context import Context, thread_state
from mpidist.autograd.dependencies import Plan
from mpidist.autograd.fence import Fence
from mpidist.autograd.recording import LEAF, Edge, Gradient, Leaf, Tensor
from mpidist.autograd.reductions import Reductions
from mpidist.autograd.single_node import run_alone
from mpidist.comm.recorder import recorder
from mpidist.errors import MpidistError

_run_backward = torch.autograd.Variable._execution_engine.run_backward


class Outlet(Protocol):
    """Receiver of a part's results."""

    def send(self, part: LocalPass, node: Node, gradients: list[Gradient]) -> None:
        """Send the gradients of received tensors back."""

    def complete(self, part: LocalPass) -> None:
        """Record that all gradients have arrived and all nodes have run."""


class LocalPass:
    """One worker's part of a backward pass.

    Args:
        outlet: Receives the results.
        context: Receives the leaves' gradients.
        key: Number of the pass.
        retain: Whether the graph is kept.
        plan: Plan from all sources.
        awaited: Keys of the sources that get gradients; None for all.

    Raises:
        MpidistError: Gradients are awaited for a key that is no source.

    Attributes:
        sent_to: Ranks that were sent gradients.
        is_stopped: The pass has failed, and the part yields no more results.
    """

    def __init__(
        self,
        outlet: Outlet,
        context: Context,
        key: int,
        retain: bool,
        plan: Plan,
        awaited: Iterable[int] | None = None,
    ) -> None:
        self.context = context
        self.key = key
        self.retain = retain
        self.sent_to: set[int] = set()
        self.is_stopped = False
        self._outlet = outlet
        self._plan = plan
        self._bits = {name: bit for bit, name in enumerate(plan.keys)}
        self._needed = self._all = (1 << len(plan.keys)) - 1
        if awaited is not None:
            awaited = set(awaited)
            if not awaited <= self._bits.keys():
                strange = sorted(awaited - self._bits.keys())
                raise MpidistError(
                    "the pass awaits gradients of messages that this worker has not sent: "
                    f"{strange[:8]}"
                )
            self._needed = sum(1 << self._bits[name] for name in awaited)
        self._arrived = self._all & ~self._needed
        # Masks whose nodes have not run.
        self._left = {mask for mask in (*plan.captures, *plan.cuts) if mask & self._needed}
        # Gradients at edges into nodes that have not run, and the fence behind these gradients.
        self._kept: dict[Edge, Tensor] = {}
        self._fence = Fence()
        self._inbox: list[tuple[int, Sequence[Gradient], Fence]] = []
        self._is_busy = False
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._reductions = Reductions(context, plan)
        self._recorder = recorder.of_process()
        signature = self._recorder.signature("backward", "part of a backward pass")
        self._entry = self._recorder.begin(signature, tag=key)

    @property
    def since(self) -> float:
        """Monotonic time of the last gradient in seconds; the current time while nodes run."""
        return time.monotonic() if self._is_busy else self._since

    def missing(self) -> list[int]:
        """Return the keys of the sources whose gradients have not arrived."""
        return [name for name, bit in self._bits.items() if not self._arrived >> bit & 1]

    def stop(self) -> None:
        """Stop yielding results and release the gradients."""
        self.is_stopped = True
        self._recorder.fail(self._entry)
        with self._lock:
            self._inbox.clear()
            if not self._is_busy:
                self._kept.clear()
                self._reductions.close()

    def deliver(self, name: int, gradients: Sequence[Gradient]) -> None:
        """Accept the gradients of one source and run the ready nodes.

        If another thread is running nodes of this part, that thread takes the gradients.

        Raises:
            Exception: A node's error, after which the part cannot be used.
        """
        # Another thread may use the gradients.
        fence = Fence(gradients)
        with self._lock:
            self._inbox.append((name, gradients, fence))
            if self._is_busy:
                return
            self._is_busy = True
        # RPC calls from nodes and hooks, as in a recomputed forward pass, are not recorded.
        before, thread_state.context = thread_state.context, None
        try:
            while not self.is_stopped:
                with self._lock:
                    arrived, self._inbox = self._inbox, []
                    if not arrived:
                        self._is_busy = False
                        break
                self._advance(arrived)
        except BaseException:
            self._reductions.close()
            raise
        finally:
            thread_state.context = before
            self._since = time.monotonic()
            if self.is_stopped:
                self._reductions.close()

    def _accept(self, arrived: list[tuple[int, Sequence[Gradient], Fence]]) -> None:
        """Store the gradients of sources at the sources' edges."""
        self._fence.block_current_streams(self._kept.values())
        for name, gradients, fence in arrived:
            fence.block_current_streams(gradients)
            bit = self._bits.get(name)
            if bit is None or self._arrived >> bit & 1:
                raise MpidistError(
                    f"gradients of message {name} have come before in this pass, or are not "
                    "awaited in it"
                )
            self._arrived |= 1 << bit
            for edge, gradient in zip(self._plan.sources[bit], gradients, strict=True):
                if gradient is not None:
                    self._keep(edge, gradient)

    def _advance(self, arrived: list[tuple[int, Sequence[Gradient], Fence]]) -> None:
        """Accept gradients and run the nodes that are ready."""
        self._accept(arrived)
        plan, masks = self._plan, self._plan.masks
        waits_for = self._all & ~self._arrived
        leaves: list[Leaf] = []
        receives: list[Node] = []
        cuts: set[Edge] = set()
        ready = [mask for mask in self._left if not mask & waits_for]
        for mask in ready:
            captures = plan.captures.get(mask)
            if captures is not None:
                leaves += captures.leaves
                receives += captures.receives
            if waits_for and mask in plan.cuts:
                cuts.update([edge for edge in plan.cuts[mask] if masks[edge[0]] & waits_for])
        if waits_for and not receives:
            self._fence.record(self._kept.values())
            # No other worker waits for these results: a later call runs the nodes together.
            return
        self._left.difference_update(ready)
        careful = {edge for edge in cuts if _needs_care(edge[0])}
        if careful:
            self._run_one_by_one(plan.above(careful, set(ready)))
            cuts -= careful
        edges = (
            [edge for edge in self._kept if not masks[edge[0]] & waits_for]
            if waits_for
            else list(self._kept)
        )
        values = [self._kept.pop(edge) for edge in edges]
        found = self._run_together(edges, values, leaves, receives, cuts)
        del values
        self._fence.record(self._kept.values())
        if self.is_stopped:
            return
        found = self._reductions.exchange(found, is_last=not waits_for)
        if found:
            self.context.gradients.add(found)
        if not waits_for:
            self._recorder.end(self._entry)
            self._outlet.complete(self)

    def _run_together(
        self,
        edges: list[Edge],
        values: list[Tensor],
        leaves: list[Leaf],
        receives: list[Node],
        cuts: Iterable[Edge],
    ) -> list[tuple[Tensor, Tensor]]:
        """Run all ready nodes in one call of torch's engine and return the leaves' gradients."""
        widths = [self.context.receives[node].width for node in receives]
        cuts = list(cuts)
        targets: list[Edge] = [(node, 0) for node in leaves]
        for node, width in zip(receives, widths, strict=True):
            targets += [(node, number) for number in range(width)]
        targets += cuts
        found = self._call(edges, values, targets) if edges and targets else [None] * len(targets)
        start = len(leaves)
        for node, width in zip(receives, widths, strict=True):
            self._send(node, list(found[start : start + width]))
            start += width
        for edge, gradient in zip(cuts, found[start:], strict=True):
            if gradient is not None:
                self._keep(edge, gradient)
        return [
            (node.variable, gradient)
            for node, gradient in zip(leaves, found, strict=False)
            if gradient is not None
        ]

    def _run_one_by_one(self, nodes: Sequence[Node]) -> None:
        """Run nodes in order, one engine call each, and store the gradients that they yield."""
        into: dict[Node, list[Edge]] = {node: [] for node in nodes}
        for edge in self._kept:
            if edge[0] in into:
                into[edge[0]].append(edge)
        for node in nodes:
            edges = into[node]
            if not edges or self.is_stopped:
                continue
            gradients = [self._kept.pop(edge) for edge in edges]
            for (below, input_nr), gradient in zip(
                node.next_functions, run_alone(self._call, node, edges, gradients), strict=True
            ):
                if below is not None and gradient is not None:
                    edge = below, input_nr
                    if below in into and edge not in self._kept:
                        into[below].append(edge)
                    self._keep(edge, gradient)

    def _call(
        self, edges: Sequence[Edge], gradients: Sequence[Tensor], targets: Sequence[Edge]
    ) -> Sequence[Gradient]:
        found: Sequence[Gradient] = _run_backward(
            tuple([GradientEdge(*edge) for edge in edges]),
            tuple(gradients),
            self.retain,
            False,
            tuple([GradientEdge(*edge) for edge in targets]),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        return found

    def _send(self, node: Node, gradients: list[Gradient]) -> None:
        if not self.is_stopped:
            self._outlet.send(self, node, gradients)

    def _keep(self, edge: Edge, gradient: Tensor) -> None:
        before = self._kept.get(edge)
        self._kept[edge] = gradient if before is None else _sum(before, gradient)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    # torch supports dense + sparse, but not sparse + dense.
    return second + first if first.is_sparse and not second.is_sparse else first + second


def _needs_care(node: Node) -> bool:
    return type(node) is not LEAF or bool(node.variable._backward_hooks)
