"""SMART mode: the sends that the roots of a pass reach, found on the small graph of messages. Pure.

torch's design note describes the mode and leaves it unbuilt: only those sends get gradients, and
only they are awaited, so results that nobody uses do no harm. Following the graph from worker to
worker would cost a round trip for each hop. Instead every worker says at once which of its receives
each of its sends reaches; the closure from the roots is computed where the pass begins. It costs
each other worker of the context three messages: the question, the answer, and the sends to await.

Source: "Distributed Autograd Design", pytorch.org/docs/stable/rpc/distributed_autograd.html
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from mpidist.autograd.dependencies import Plan
from mpidist.autograd.recording import Node, Receive

Hop = tuple[int, int]  # a message, and the worker that sent it
# by message that this worker sent: the receives that it reaches
Summary = Mapping[int, Sequence[Hop]]


def summary(plan: Plan, receives: Mapping[Node, Receive]) -> dict[int, list[Hop]]:
    """Return the receives that each source of a plan reaches, by the source's key."""
    found: dict[int, list[Hop]] = {key: [] for key in plan.keys}
    for mask, captures in plan.captures.items():
        hops = [(receives[node].message, receives[node].source) for node in captures.receives]
        if hops:
            for place, key in enumerate(plan.keys):
                if mask >> place & 1:
                    found[key] += hops
    return found


def closure(summaries: Mapping[int, Summary], roots: Iterable[Hop]) -> dict[int, set[int]]:
    """Return the sends that the roots reach, by worker.

    Args:
        summaries: By worker.
        roots: The receives that the roots reach on their own worker.
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
    """The summaries of all workers of a context, as they come.

    Args:
        me: The worker that asks.
        own: Its own summary.
        peers: The workers that it shares the context with.

    Attributes:
        summaries: By worker.
        asked: Workers, the asking one among them.
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
        """Take a worker's answer; say whether it is time to ask others, or to begin.

        True once for each of the two.
        """
        with self._lock:
            self.summaries[worker] = summary
            self._found.update(peers)
            return bool(self._found - self.asked) or self._has_all()

    def expects(self, worker: int) -> bool:
        """Return whether a worker was asked and has not answered."""
        return worker in self.asked and worker not in self.summaries

    def is_complete(self) -> bool:
        """Say whether all that are known have answered; True once."""
        with self._lock:
            self._is_over, before = self._has_all(), self._is_over
            return self._is_over and not before

    def _has_all(self) -> bool:
        return self._found | self.asked <= self.summaries.keys()
