"""Schedule of a ring algorithm: the chunk that a rank sends and receives in each step (pure).

Letters: W ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Leg:
    """One chunk in one step of the ring.

    Attributes:
        step: Number of the step, 0 … W - 2.
        sent: The shard whose chunk this rank sends.
        received: The shard whose chunk this rank receives.
        start: First element within the shard.
        numel: Elements, at most; a shorter shard ends earlier.
    """

    step: int
    sent: int
    received: int
    start: int
    numel: int


def legs(size: int, longest: int, chunk: int, first_sent: int) -> list[Leg]:
    """Return the chunks of all W - 1 steps around the ring.

    Args:
        size: W.
        longest: Elements of the longest shard.
        chunk: Elements of a chunk.
        first_sent: The shard that this rank sends first; it receives the previous shard, and sends
            that one in the next step.
    """
    starts = range(0, longest, chunk)
    return [
        Leg(
            step,
            (first_sent - step) % size,
            (first_sent - step - 1) % size,
            start,
            min(chunk, longest - start),
        )
        for step in range(size - 1)
        for start in starts
    ]
