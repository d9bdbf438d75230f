"""SMART mode: the sends that the roots of a pass reach, computed on the graph of messages. Pure.

torch's design note describes the mode; torch does not implement it. Only the sends that the roots
reach get gradients and are awaited, so unused results do no harm. Following the graph from worker
to worker would take a round trip per hop. Instead every worker sends the initiator the receives
that each of its sends reaches, and the initiator computes the closure from the roots. Each other
worker of the context exchanges three messages with the initiator: the question, the answer, and
the sends to await.

Source: "Distributed Autograd Design", pytorch.org/docs/stable/rpc/distributed_autograd.html
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from torch.autograd.graph import Node

from mpidist.autograd.dependencies import Plan
from mpidist.autograd.recording import Receive

Hop = tuple[int, int]  # message, rank of its sender
# The receives that each sent message reaches, by message number.
Summary = Mapping[int, Sequence[Hop]]


def summary(plan: Plan, receives: Mapping[Node, Receive]) -> dict[int, list[Hop]]:
    """Return the receives that each source of a plan reaches, by the source's key."""
    found: dict[int, list[Hop]] = {key: [] for key in plan.keys}
    for mask, captures in plan.captures.items():
        hops = [(receives[node].message, receives[node].source) for node in captures.receives]
        if hops:
            for bit, key in enumerate(plan.keys):
                if mask >> bit & 1:
                    found[key] += hops
    return found


def closure(summaries: Mapping[int, Summary], roots: Iterable[Hop]) -> dict[int, set[int]]:
    """Return the sends that the roots reach, by worker.

    Args:
        summaries: Summaries by worker.
        roots: The receives that the roots reach on the initiator.
    """
    reached: dict[int, set[int]] = {}
    waiting = list(roots)
    while waiting:
        message, worker = waiting.pop()
        sends = reached.setdefault(worker, set())
        if message not in sends:
            sends.add(message)
            waiting += summaries.get(worker, {}).get(message, ())
    return reached


class Survey:
    """Collection of the summaries of all workers of a context.

    Args:
        me: Rank of the initiator.
        own: The initiator's summary.
        peers: Ranks that the initiator shares the context with.

    Attributes:
        summaries: Summaries by worker.
        asked: Ranks that were asked, and the initiator.
    """

    def __init__(self, me: int, own: Summary, peers: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self.summaries: dict[int, Summary] = {me: own}
        self.asked: set[int] = {me}
        self._found = set(peers)
        self._is_over = False

    def next(self) -> set[int]:
        """Return the workers to ask now."""
        with self._lock:
            new = self._found - self.asked
            self.asked |= new
            return new

    def add(self, worker: int, summary: Summary, peers: Iterable[int]) -> bool:
        """Record a worker's answer; return whether to ask further workers or to begin."""
        with self._lock:
            self.summaries[worker] = summary
            self._found.update(peers)
            return bool(self._found - self.asked) or self._has_all()

    def expects(self, worker: int) -> bool:
        """Return whether a worker was asked and has not answered."""
        return worker in self.asked and worker not in self.summaries

    def is_complete(self) -> bool:
        """Return whether all known workers have answered; True only once."""
        with self._lock:
            self._is_over, before = self._has_all(), self._is_over
            return self._is_over and not before

    def _has_all(self) -> bool:
        return self._found | self.asked <= self.summaries.keys()
