"""Ranks as text (pure): runs of neighbours as ranges.

A message that names ranks stays short on large jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

_MOST = 8  # ranges


def named(ranks: Collection[int], word: str = "rank") -> str:
    """Return ``rank 3``, ``ranks 1, 2`` or ``ranks 0, 3-127``; of many ranges the first eight."""
    return f"{word}{'' if len(ranks) == 1 else 's'} {numbers(ranks)}"


def numbers(ranks: Collection[int]) -> str:
    """Return the ranks in ascending order: ``0, 3-127``; of many ranges the first eight."""
    texts = list(_texts(ranks))
    if len(texts) <= _MOST:
        return ", ".join(texts)
    return f"{', '.join(texts[:_MOST])}, ... ({len(ranks)} of them)"


def _texts(ranks: Collection[int]) -> Iterator[str]:
    """Yield the ranges; two neighbours are two numbers."""
    run: list[int] = []
    for rank in [*sorted(ranks), None]:
        if run and rank != run[-1] + 1:
            yield from [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            run = []
        if rank is not None:
            run.append(rank)
