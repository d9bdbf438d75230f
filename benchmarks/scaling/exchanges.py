"""Collectives between nodes as rounds of exchanged messages, timed by one round. Pure.

In a round each node sends a message and receives one of the same length, and the rounds of an
algorithm follow each other. An all-reduce of N bytes over n nodes has

- by recursive doubling log2 n rounds of N bytes;
- by recursive halving and doubling two rounds each of N/2, N/4, … N/n bytes;
- by a ring 2·(n-1) rounds of N/n bytes.

The last two are a reduce-scatter and then an all-gather, of half of the rounds each.

``cost_model`` counts log2 n latencies, a ring has many more. Its ranges are of N, while MPI's
protocol for long messages begins at the length of one message: over more nodes, at a larger N. So
here a round has the latency, the bytes and the ranges, and a collective is the sum of its rounds.

A round is fitted to rings of few nodes, whose rounds are all alike. In a ring of short messages it
costs the mean over the hops: a rank waits for the one before it alone, and what a long hop delays
comes around once in n rounds. Where a sender waits for its receiver (long messages), the longest
hop sets the pace of all. Neither distances beyond the fitted nodes nor messages that share a cable
are in the time of a round.

Sources: Hockney (1994) for a round; Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), for recursive doubling and halving; Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), for the ring.

Letters: n nodes of one rank each, N bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scaling import cost_model
from scaling.cost_model import Fit, Point

DOUBLING, HALVING, RING = "recursive doubling", "recursive halving", "ring"
ALGORITHMS = (DOUBLING, HALVING, RING)
# Of each algorithm, how often it goes through all nodes.
_HALVES = {HALVING: 1, RING: 1}
_PARTS = {
    "all_reduce": {DOUBLING: 1, HALVING: 2, RING: 2},
    "all_gather": _HALVES,
    "reduce_scatter": _HALVES,
}


def rounds(
    algorithm: str, nodes: int, nbytes: int, operation: str = "all_reduce"
) -> list[tuple[int, float]]:
    """Return the rounds of a collective: how many of how many bytes; none for one node.

    Args:
        algorithm: One of ``ALGORITHMS``; recursive doubling for all-reduces alone.
        nodes: n.
        nbytes: N; of an all-gather or a reduce-scatter, the whole buffer's.
        operation: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.

    Raises:
        ValueError: There is no such algorithm of the operation, or it needs a power of two of
            nodes.
    """
    parts = _PARTS.get(operation, {})
    if algorithm not in parts:
        raise ValueError(f"no algorithm {algorithm!r} of {operation}; there are {', '.join(parts)}")
    if nodes == 1:
        return []
    halves = parts[algorithm]
    if algorithm == RING:
        return [(halves * (nodes - 1), nbytes / nodes)]
    if nodes & (nodes - 1):
        raise ValueError(f"{algorithm} needs a power of two of nodes; got {nodes}")
    steps = nodes.bit_length() - 1
    if algorithm == DOUBLING:
        return [(steps, float(nbytes))]
    return [(halves, nbytes / 2**step) for step in range(1, steps + 1)]


@dataclass(frozen=True)
class Exchanges:
    """Times of collectives by one algorithm.

    Attributes:
        algorithm: One of ``ALGORITHMS``.
        round_fit: Of a round (``fit_round``).
    """

    algorithm: str
    round_fit: Fit

    def seconds(self, point: Point) -> float:
        """Return the time of a case; 0 for one node."""
        made = rounds(self.algorithm, point.nodes, point.nbytes, point.operation)
        return sum(count * self.round_fit.seconds(_round(point, nbytes)) for count, nbytes in made)


def fit_round(rings: Iterable[Point]) -> Fit:
    """Fit the time of a round to all-reduces by rings.

    Rings of several numbers of nodes have rounds of the same length; the largest of them counts, as
    its hops are most like those of larger ones.

    Raises:
        ValueError: No ring of more than one node, or one with several ranks on a node.
    """
    known: dict[tuple[float, int], Point] = {}
    for point in sorted(rings, key=lambda point: point.nodes):
        if point.ranks_per_node != 1:
            raise ValueError("rounds are of one rank a node")
        for count, nbytes in rounds(RING, point.nodes, point.nbytes):
            one = replace(_round(point, nbytes), seconds=point.seconds / count)
            known[one.rate_gbit_s, one.nbytes] = one
    return cost_model.fit(known.values())


def _round(point: Point, nbytes: float) -> Point:
    # An all-gather of two nodes is one message each way, of half of its bytes.
    return replace(point, operation="all_gather", nodes=2, nbytes=round(2 * nbytes), seconds=0.0)
