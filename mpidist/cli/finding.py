"""One finding of the doctor, and how ranks and nodes are named and grouped in it; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpidist.cli.facts import Facts

PROBLEM, WARNING, NOTE = "problem", "warning", "note"


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        level: ``PROBLEM`` stops jobs, ``WARNING`` makes them slow or wrong in some cases, ``NOTE``
            is to be known.
        ranks: Ranks concerned; empty where it is no matter of ranks.
        text: What was found.
        remedy: What to do; "" if nothing is to be done.
    """

    level: str
    ranks: tuple[int, ...]
    text: str
    remedy: str


def values(ranks: Sequence[Facts], ask: Callable[[Facts], Any]) -> dict[Any, tuple[int, ...]]:
    """Return each answer with the ranks that give it, in the order of their first ranks."""
    by_answer: dict[Any, list[int]] = defaultdict(list)
    for facts in ranks:
        by_answer[ask(facts)].append(facts.rank)
    return {answer: tuple(where) for answer, where in by_answer.items()}


def by_node(ranks: Sequence[Facts]) -> dict[int, list[Facts]]:
    """Return the ranks of each node, as MPI sees nodes; without MPI all are of node 0."""
    nodes: dict[int, list[Facts]] = defaultdict(list)
    for facts in ranks:
        nodes[facts.mpi.nodes[facts.rank] if facts.mpi is not None else 0].append(facts)
    return dict(nodes)


def several_on_a_node(ranks: Sequence[Facts]) -> list[list[Facts]]:
    """Return the ranks of those nodes that have several."""
    return [members for members in by_node(ranks).values() if len(members) > 1]


def ranks_of(numbers: Sequence[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0-3, 8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(texts)}"


def size(nbytes: int) -> str:
    """Return a number of bytes in words; -1 is no limit."""
    if nbytes < 0:
        return "unlimited"
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
