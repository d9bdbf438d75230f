"""All-reduces as rounds of sends and receives: recursive doubling, halving, rings. Pure.

In each round a rank sends to one rank and receives from one; the next round begins when both are
done and what came is added. Recursive doubling sends the whole buffer log2 W times. Recursive
halving and doubling is a reduce-scatter and an all-gather of log2 W rounds each, with halves of
what is left. The ring does both in W - 1 rounds of a shard.

``chosen`` is what MPI libraries take, as their documentation and sources state it for one rank a
node: this library leaves an all-reduce between nodes to MPI (decision 0009).

Sources: Thakur, Rabenseifner and Gropp (2005); the decision functions of MPICH (``MPIR_Allreduce``)
and Open MPI (``coll/tuned``).

Letters: W ranks, N bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scaling.exchanges import ALGORITHMS, DOUBLING, HALVING, RING

LIBRARIES = ("mpich", "openmpi")
# Bytes up to which a library takes recursive doubling.
_SHORT_BYTES = {"mpich": 2048, "openmpi": 10_000}


@dataclass(frozen=True)
class Round:
    """Messages of one rank in one round; ``added_bytes`` of what it receives are added."""

    to: int
    sent_bytes: int
    source: int
    received_bytes: int
    added_bytes: int


def chosen(library: str, nbytes: int, ranks: int) -> str:
    """Return the algorithm of an MPI library for an all-reduce between nodes.

    Raises:
        ValueError: The library is unknown.
    """
    if library not in LIBRARIES:
        raise ValueError(f"no library {library!r}; there are {', '.join(LIBRARIES)}")
    if nbytes <= _SHORT_BYTES[library] or nbytes // 4 < ranks:
        return DOUBLING
    return RING if takes_rings(library) else HALVING


def takes_rings(library: str) -> bool:
    """Return whether an MPI library's long all-reduces are rings."""
    return library == "openmpi"


def rounds(algorithm: str, rank: int, ranks: int, nbytes: int) -> Iterator[Round]:
    """Yield a rank's rounds of an all-reduce.

    Raises:
        ValueError: The algorithm is unknown, or needs a power of two of ranks.
    """
    if algorithm == RING:
        yield from _ring(rank, ranks, nbytes)
        return
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if ranks & (ranks - 1):
        raise ValueError(f"{algorithm} needs a power of two of ranks; got {ranks}")
    if algorithm == DOUBLING:
        distance = 1
        while distance < ranks:
            peer = rank ^ distance
            yield Round(peer, nbytes, peer, nbytes, nbytes)
            distance *= 2
        return
    yield from _halving(rank, ranks, nbytes)


def halved(algorithm: str) -> str:
    """Return the algorithm whose halves are a reduce-scatter and an all-gather.

    Recursive doubling has none; its short buffers go by recursive halving's.
    """
    return RING if algorithm == RING else HALVING


def scatter_rounds(algorithm: str, rank: int, ranks: int, nbytes: int) -> list[Round]:
    """Return a rank's rounds of a reduce-scatter of ``nbytes``: the first half of ``rounds``."""
    made = list(rounds(halved(algorithm), rank, ranks, nbytes))
    return made[: len(made) // 2]


def gather_rounds(algorithm: str, rank: int, ranks: int, nbytes: int) -> list[Round]:
    """Return a rank's rounds of an all-gather of ``nbytes`` in all: the second half."""
    made = list(rounds(halved(algorithm), rank, ranks, nbytes))
    return made[len(made) // 2 :]


def _halving(rank: int, ranks: int, nbytes: int) -> Iterator[Round]:
    # MPICH's order: near ranks exchange the large halves.
    begin, end, distance = 0, ranks, 1
    kept: list[tuple[int, int, int]] = []
    while distance < ranks:
        peer, middle = rank ^ distance, (begin + end) // 2
        low, high = _span(begin, middle, ranks, nbytes), _span(middle, end, ranks, nbytes)
        mine, other = (low, high) if rank < peer else (high, low)
        yield Round(peer, other, peer, mine, mine)
        kept.append((peer, mine, other))
        begin, end = (begin, middle) if rank < peer else (middle, end)
        distance *= 2
    for peer, mine, other in reversed(kept):
        yield Round(peer, mine, peer, other, 0)


def _ring(rank: int, ranks: int, nbytes: int) -> Iterator[Round]:
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(2 * (ranks - 1)):
        sent, received = (rank - step) % ranks, (rank - step - 1) % ranks
        coming = _span(received, received + 1, ranks, nbytes)
        yield Round(
            to,
            _span(sent, sent + 1, ranks, nbytes),
            source,
            coming,
            coming if step < ranks - 1 else 0,
        )


def _span(begin: int, end: int, ranks: int, nbytes: int) -> int:
    """Return the bytes of the shards from ``begin`` to ``end``."""
    return nbytes * end // ranks - nbytes * begin // ranks
